// The page: header, key, state of the server, and which of the two views is shown.

import { ApiError, getJson, hasKey, keepKey, setKeyHandler } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";

const POLL_MS = 2500;
const chat = new Chat();
const live = new Live();
const wide = matchMedia("(min-width: 1080px)");
let state = ""; // of the server, as /readyz says it; "gone" without an answer

// ---- the key

const dialog = byId("key-dialog");

function askForKey(wasWrong = false) {
  if (dialog.open) return;
  if (wasWrong) byId("key-message").textContent = "The server did not accept that key. Try another.";
  byId("key").value = "";
  dialog.showModal();
}

byId("key-form").addEventListener("submit", () => {
  keepKey(byId("key").value.trim());
  refresh();
});
setKeyHandler(askForKey);

// ---- the server

const SAYS = {
  gone: "The server does not answer. This page tries again every few seconds.",
  loading: "The server is loading the model.",
  draining: "The server is shutting down.",
  dead: "The engine has ended; the server's log says why.",
};

async function poll() {
  let now = "gone";
  try {
    const response = await fetch("/readyz");
    now = (await response.json()).status;
  } catch {
    // "gone": no connection, or something else answers in the server's place
  }
  const before = state;
  state = now;
  const banner = byId("banner");
  if (now !== "ready") {
    banner.textContent = SAYS[now] ?? SAYS.gone;
    banner.className = "banner";
    banner.hidden = false;
    live.stop();
  } else if (before !== "ready") {
    banner.hidden = before === "";
    banner.textContent = "The server is back.";
    banner.className = "banner good";
    if (before !== "") setTimeout(() => state === "ready" && (banner.hidden = true), 4000);
    refresh();
  }
  setTimeout(poll, POLL_MS);
}

async function refresh() {
  try {
    const facts = await getJson("/");
    if (facts.model === null && !hasKey()) {
      askForKey(); // a server with a key does not name its model here
      return;
    }
    const card = (await getJson("/v1/models")).data[0];
    byId("model").textContent = card.id;
    document.title = `${card.id} · Paceline`;
    showViews();
  } catch (error) {
    if (!(error instanceof ApiError)) state = "";
  }
}

// ---- the two views: side by side, or one at a time

function showViews() {
  const isShown = wide.matches || document.body.dataset.view === "live";
  if (isShown && !document.hidden && state === "ready") live.start();
  else live.stop();
}

function choose(view) {
  document.body.dataset.view = view;
  for (const name of ["chat", "live"]) {
    byId(`tab-${name}`).setAttribute("aria-pressed", String(name === view));
  }
  showViews();
}

for (const view of ["chat", "live"]) byId(`tab-${view}`).addEventListener("click", () => choose(view));
wide.addEventListener("change", showViews);
document.addEventListener("visibilitychange", showViews);

// ---- colours and keys

const THEMES = ["auto", "light", "dark"];

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `◐ ${theme[0].toUpperCase()}${theme.slice(1)}`;
  byId("theme").title = theme === "auto" ? "Colours: as the system has them" : `Colours: ${theme}`;
  localStorage.setItem("paceline-theme", theme);
  live.redraw();
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme;
  useTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.redraw());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "/" && !isTyping && !dialog.open) {
    event.preventDefault();
    choose("chat");
    chat.prompt.focus();
  }
});

const stored = localStorage.getItem("paceline-theme");
useTheme(THEMES.includes(stored) ? stored : "auto");
poll();
