// Requests to the server, with the key, and streams of server-sent events.

const KEY = "paceline-key";
let onKeyNeeded = () => {};

export function setKeyHandler(handler) {
  onKeyNeeded = handler;
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not the server's own error body: the status has to do.
  }
  if (response.status === 401) onKeyNeeded(key !== null);
  throw new ApiError(response.status, message);
}

export async function getJson(path) {
  const response = await request(path, { headers: { Accept: "application/json" } });
  return response.json();
}

// The objects of a stream of events, as they come. Raises an error event as an ApiError.
export async function* events(path, options) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new ApiError(0, event.error.message);
      yield event;
    }
  }
}
