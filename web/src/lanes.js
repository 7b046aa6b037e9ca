// Draws the stages of the host's loop and the steps of the device over one time scale.

import { byId, colour, duration, make } from "./dom.js";

const SHOWN_STEPS = 10;
const KEPT_SPANS = 1200; // of one rank
const ROW = 26;
const GAP = 6;
const RANK_GAP = 14;
const LEFT = 58;
const AXIS = 20;
const SPACES_US = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((e) => n * 10 ** e)).sort((a, b) => a - b);

const laneColour = (name) => colour(`--lane-${name}`);

export class Lanes {
  #ranks = new Map(); // rank -> spans {lane, step, start, end}
  #boxes = []; // what is drawn, for the tip
  #names = [];
  isFrozen = false;

  constructor() {
    this.canvas = byId("lanes");
    this.tip = byId("tip");
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  clear() {
    this.#ranks.clear();
  }

  take(frame) {
    this.#names = frame.lanes;
    if (this.isFrozen) return;
    for (const { rank, spans } of frame.ranks) {
      const kept = this.#ranks.get(rank) ?? [];
      for (const [lane, step, start, length] of spans) {
        kept.push({ lane: frame.lanes[lane], step, start, end: start + length });
      }
      this.#ranks.set(rank, kept.slice(-KEPT_SPANS));
    }
    this.draw();
  }

  // Seconds of each stage of the host over the kept steps of a rank.
  stages(rank) {
    const sums = {};
    for (const { lane, start, end } of this.#ranks.get(rank) ?? []) {
      if (lane !== "device") sums[lane] = (sums[lane] ?? 0) + (end - start) / 1e6;
    }
    return sums;
  }

  showLegend(element) {
    if (element.childElementCount || !this.#names.length) return;
    for (const name of [...this.#names, "bubble"]) {
      const entry = make("span", "phase", name === "device" ? "device step" : name);
      entry.style.setProperty("--phase", `var(--lane-${name})`);
      element.append(entry);
    }
  }

  draw() {
    const { canvas } = this;
    const ranks = [...this.#ranks].filter(([, spans]) => spans.length).sort((a, b) => a[0] - b[0]);
    const height = Math.max(1, ranks.length) * (2 * ROW + GAP + RANK_GAP) - RANK_GAP + AXIS + 4;
    const width = canvas.parentElement.clientWidth;
    const ratio = devicePixelRatio;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const ink = canvas.getContext("2d");
    ink.scale(ratio, ratio);
    this.#boxes = [];
    const style = getComputedStyle(canvas);
    ink.font = `12px ${style.fontFamily}`;
    ink.textBaseline = "middle";
    let bubbles = 0;
    let whole = 0;
    ranks.forEach(([rank, spans], i) => {
      const top = i * (2 * ROW + GAP + RANK_GAP);
      const shown = windowOf(spans);
      const scale = (width - LEFT - 4) / (shown.end - shown.start);
      const of = ranks.length > 1 ? ` ${rank}` : "";
      ink.fillStyle = laneColour("label");
      ink.fillText(`Host${of}`, 0, top + ROW / 2);
      ink.fillText(`Device${of}`, 0, top + ROW + GAP + ROW / 2);
      bubbles += this.#drawRank(ink, shown, top, scale);
      whole += shown.end - shown.start;
      if (i === ranks.length - 1) this.#drawAxis(ink, shown, top + 2 * ROW + GAP + 4, scale);
    });
    if (!ranks.length) {
      ink.fillStyle = laneColour("label");
      ink.fillText("No step yet. Send a message.", 0, ROW);
    }
    const share = whole ? (100 * bubbles) / whole : 0;
    byId("lane-hint").textContent = ranks.length ? `device idle ${share.toFixed(1)} %` : "";
  }

  #drawRank(ink, { start, device, host, gaps }, top, scale) {
    const box = (y, from, to, name, label, step) => {
      const x = LEFT + (from - start) * scale;
      const size = Math.max(1, (to - from) * scale);
      ink.fillStyle = laneColour(name);
      ink.beginPath();
      ink.roundRect(x, y, Math.max(1, size - (size > 6 ? 1 : 0)), ROW, size > 8 ? 3 : 0);
      ink.fill();
      const text = `${label}, step ${step}: ${duration((to - from) / 1e6)}`;
      this.#boxes.push({ x, y, size: Math.max(size, 3), text });
      if (name === "device" && size > 40) {
        ink.fillStyle = laneColour("ink");
        ink.textAlign = "center";
        ink.fillText(step, x + size / 2, y + ROW / 2 + 1);
        ink.textAlign = "start";
      }
    };
    ink.save();
    ink.beginPath();
    ink.rect(LEFT, top, 1e5, 1e5);
    ink.clip();
    for (const span of host) if (span.lane === "wait") box(top, span.start, span.end, "wait", "wait for the device", span.step);
    for (const span of host) if (span.lane !== "wait") box(top, span.start, span.end, span.lane, span.lane, span.step);
    for (const span of device) box(top + ROW + GAP, span.start, span.end, "device", "device", span.step);
    for (const gap of gaps) box(top + ROW + GAP, gap.start, gap.end, "bubble", "bubble before it", gap.step);
    ink.restore();
    return gaps.reduce((sum, gap) => sum + gap.end - gap.start, 0);
  }

  #drawAxis(ink, { start, end }, y, scale) {
    const space = SPACES_US.find((n) => n * scale > 70) ?? (end - start);
    ink.fillStyle = ink.strokeStyle = laneColour("label");
    ink.textAlign = "center";
    for (let at = 0; at <= end - start; at += space) {
      const x = LEFT + at * scale;
      ink.fillRect(x, y, 1, 4);
      ink.fillText(at ? duration(at / 1e6) : "0", Math.min(Math.max(x, LEFT + 4), LEFT + (end - start) * scale - 24), y + 11);
    }
    ink.textAlign = "start";
  }

  #point(event) {
    const { offsetX: x, offsetY: y } = event;
    const hit = this.#boxes.findLast((b) => x >= b.x && x <= b.x + b.size && y >= b.y && y <= b.y + ROW);
    this.tip.hidden = !hit;
    if (!hit) return;
    this.tip.textContent = hit.text;
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x + 8, room))}px`;
    this.tip.style.top = `${y + 18}px`;
  }
}

// The newest steps whose device time is known, and the bubbles between them.
function windowOf(spans) {
  const device = spans.filter((s) => s.lane === "device").slice(-SHOWN_STEPS);
  const host = spans.filter((s) => s.lane !== "device");
  if (!device.length) return { start: host[0].start, end: host.at(-1).end, device, host, gaps: [] };
  // A pause without work is cut off: only the steps after it are shown.
  let first = device.length - 1;
  const gaps = [];
  for (; first > 0; first--) {
    const gap = { start: device[first - 1].end, end: device[first].start, step: device[first].step };
    if (gap.end <= gap.start) continue;
    if (!isBubble(gap, host)) break;
    gaps.push(gap);
  }
  const start = device[first].start;
  const end = device.at(-1).end;
  const isIn = (span) => span.end >= start && span.start <= end;
  return { start, end, device: device.slice(first), host: host.filter(isIn), gaps };
}

// Idle time of the device is a bubble if the loop was at work meanwhile: it had work to launch.
function isBubble(gap, host) {
  let covered = 0;
  for (const { start, end } of host) {
    covered += Math.max(0, Math.min(end, gap.end) - Math.max(start, gap.start));
  }
  return covered >= 0.5 * (gap.end - gap.start);
}
