// Small shorthands for the page's elements.

export const byId = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function button(text, className, onClick) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

// A colour of the style sheet as canvases understand it: light-dark() is resolved.
const colours = new Map();
export function colour(name, alpha = 1) {
  if (!colours.has(name)) {
    const probe = make("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  const found = colours.get(name);
  return alpha === 1 ? found : found.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
}
export const forgetColours = () => colours.clear();

export const digits = (value, places = 1) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: places }) : "–";

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds >= 1) return `${digits(seconds, 2)} s`;
  if (seconds >= 0.001) return `${digits(seconds * 1e3, seconds < 0.01 ? 1 : 0)} ms`;
  return `${digits(seconds * 1e6, 0)} µs`;
}

export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea"); // a page over plain HTTP from another machine has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
