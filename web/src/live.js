// The live view: reads /v1/live while it is shown.

import { events, request } from "./api.js";
import { Bars, Lines, SECONDS, redrawCharts } from "./charts.js";
import { byId, digits, duration, forgetColours, make } from "./dom.js";
import { Lanes } from "./lanes.js";

const RETRY_MS = 2000;
const RATE_S = 1; // tokens per second are taken over this time

export class Live {
  #abort = null;
  #frames = []; // of the last minute, without spans

  constructor() {
    this.lanes = new Lanes();
    this.accept = new Bars("chart-accept", "--accent", { most: 100, unit: " %" });
    this.ttft = new Bars("chart-ttft", "--blue");
    this.itl = new Bars("chart-itl", "--blue");
    this.rate = new Lines("chart-rate", [["tokens/s", "--accent"]]);
    this.load = new Lines("chart-load", [["running", "--accent"], ["waiting", "--amber"]]);
    this.kv = new Lines("chart-kv", [["KV", "--blue"]], { most: 100, unit: " %" });
    byId("freeze").addEventListener("click", (event) => {
      this.lanes.isFrozen = !this.lanes.isFrozen;
      event.target.setAttribute("aria-pressed", String(this.lanes.isFrozen));
      event.target.textContent = this.lanes.isFrozen ? "Go on" : "Freeze";
    });
    byId("trace").addEventListener("click", () => this.#download());
    this.#showTiles({});
  }

  start() {
    if (this.#abort) return;
    this.#abort = new AbortController();
    this.#read(this.#abort.signal);
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  redraw() {
    forgetColours();
    redrawCharts();
    this.lanes.draw();
  }

  async #read(signal) {
    const notice = byId("live-notice");
    while (!signal.aborted) {
      try {
        for await (const frame of events("/v1/live", { signal })) {
          notice.hidden = true;
          this.#take(frame);
        }
      } catch (error) {
        if (signal.aborted) return;
        notice.textContent = error.status ? error.message : "The live view is interrupted.";
        notice.hidden = false;
        if (error.status === 401) {
          this.stop(); // it is started again with the key
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #take(frame) {
    this.lanes.take(frame);
    this.lanes.showLegend(byId("phases"));
    const frames = this.#frames;
    if (frames.length && frame.num_steps < frames.at(-1).num_steps) frames.length = 0; // it restarted
    frames.push({ ...frame, ranks: null });
    while (frames[0].time_s < frame.time_s - SECONDS) frames.shift();
    const before = frames.findLast((f) => f.time_s <= frame.time_s - RATE_S) ?? frames[0];
    frames.at(-1).rate = (frame.num_generated_tokens - before.num_generated_tokens) / (frame.time_s - before.time_s || 1);
    this.#showTiles(frames.at(-1));
    const times = frames.map((f) => f.time_s - frame.time_s);
    this.rate.show([times, frames.map((f) => f.rate)]);
    this.load.show([times, frames.map((f) => f.num_running), frames.map((f) => f.num_waiting)]);
    this.kv.show([times, frames.map((f) => 100 * f.kv_usage)]);
    const accepted = frame.accepted_per_position.map((n) => (100 * n) / Math.max(1, frame.num_drafts));
    this.accept.show(accepted.map((_, i) => String(i + 1)), accepted);
    this.ttft.show(...bars(frame.time_to_first_token));
    this.itl.show(...bars(frame.inter_token_latency));
    this.#showRanks(frame.ranks);
  }

  #showTiles(now) {
    const drafts = now.num_draft_tokens ? `${digits((100 * now.num_accepted_tokens) / now.num_draft_tokens, 0)} %` : "–";
    const busy = now.busy_s + now.bubble_s;
    const tiles = [
      ["Running", digits(now.num_running, 0), "sequences in the batch"],
      ["Waiting", digits(now.num_waiting, 0), "sequences that do not run yet"],
      ["Tokens/s", digits(now.rate), "over the last second"],
      ["KV cache", Number.isFinite(now.kv_usage) ? `${digits(100 * now.kv_usage)} %` : "–", "pages in use"],
      ["Accepted", now.max_drafts === 0 ? "no drafter" : drafts, "of all draft tokens since the start"],
      ["Bubble", busy ? `${digits((100 * now.bubble_s) / busy, 1)} %` : "–", "of the device's time since the start, with work waiting"],
    ];
    byId("tiles").replaceChildren(...tiles.map(([name, value, title]) => {
      const tile = make("div", "tile");
      tile.title = title;
      tile.append(make("b", "", value), make("span", "", name));
      return tile;
    }));
  }

  #showRanks(ranks) {
    byId("rank-card").hidden = ranks.length < 2;
    if (ranks.length < 2) return;
    byId("ranks").replaceChildren(...ranks.map(({ rank, num_running, kv_usage }) => {
      const row = make("tr");
      const stages = Object.entries(this.lanes.stages(rank)).map(([name, s]) => `${name} ${duration(s)}`);
      for (const text of [rank, num_running, `${digits(100 * kv_usage)} %`, stages.join(", ") || "–"]) {
        row.append(make("td", "", String(text)));
      }
      return row;
    }));
  }

  async #download() {
    const notice = byId("live-notice");
    try {
      const url = URL.createObjectURL(await (await request("/v1/live/trace")).blob());
      const link = make("a");
      link.href = url;
      link.download = "paceline-trace.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    } catch (error) {
      notice.textContent = `The trace could not be loaded: ${error.message}`;
      notice.hidden = false;
    }
  }
}

// Names and counts of the buckets that have values, with one empty bucket on each side.
function bars(pairs) {
  const counts = pairs.map(([, n], i) => n - (i ? pairs[i - 1][1] : 0));
  const first = counts.findIndex((n) => n > 0);
  if (first === -1) return [[], []];
  const last = counts.findLastIndex((n) => n > 0);
  const [from, to] = [Math.max(0, first - 1), Math.min(counts.length, last + 2)];
  const names = pairs.map(([bound]) => (bound === "+Inf" ? "more" : duration(Number(bound))));
  return [names.slice(from, to), counts.slice(from, to)];
}
