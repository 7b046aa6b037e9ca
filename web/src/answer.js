// One answer: asks for it, shows it while it streams, and measures it.

import { events } from "./api.js";
import { digits, duration, make } from "./dom.js";
import { render } from "./markdown.js";
import { Painter, TokenLog } from "./sources.js";

const REPAINT_MS = 60;
const SHORTEST_S = 0.25; // what came faster says nothing about speed: chunks arrive together

export class Answer {
  content = "";
  reasoning = "";
  finish = "";
  log = new TokenLog();
  #painter = new Painter();
  #beganMs = 0;
  #firstMs = 0;
  #lastMs = 0;
  #numFirst = 0; // tokens of the first chunk
  #timer = 0;

  constructor(title = "") {
    this.element = make("div", "answer");
    if (title) this.element.append(make("h3", "", title));
    this.thinking = make("details", "thinking");
    this.thinking.hidden = true;
    this.thinking.append(make("summary", "", "Thinking"), make("div", "text"));
    this.body = make("div", "text");
    this.share = make("div", "share");
    this.stats = make("div", "stats");
    this.element.append(this.thinking, this.body, this.share, this.stats);
    this.element.classList.add("busy");
    this.body.append(make("span", "cursor"));
  }

  // Streams an answer. Raises ApiError, or an AbortError after `signal`.
  async run(body, signal) {
    this.#beganMs = performance.now();
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, return_token_sources: true }),
      signal,
    };
    try {
      for await (const event of events("/v1/chat/completions", options)) this.#take(event);
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      throw error;
    } finally {
      clearTimeout(this.#timer);
      this.element.classList.remove("busy");
      this.paint();
    }
  }

  #take(event) {
    const choice = event.choices?.[0];
    if (!choice) return;
    const tokens = choice.token_sources ?? [];
    if (tokens.length) {
      this.#lastMs = performance.now();
      if (!this.#firstMs) {
        this.#firstMs = this.#lastMs;
        this.#numFirst = tokens.length;
      }
      this.log.add(tokens);
    }
    this.content += choice.delta.content ?? "";
    this.reasoning += choice.delta.reasoning ?? "";
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (!this.#timer) this.#timer = setTimeout(() => this.paint(), REPAINT_MS);
  }

  paint() {
    this.#timer = 0;
    this.#painter.clear();
    if (this.reasoning) {
      this.thinking.hidden = false;
      this.thinking.querySelector(".text").replaceChildren(render(this.reasoning));
    }
    this.body.replaceChildren(render(this.content));
    if (!this.content && this.element.classList.contains("busy")) {
      this.body.append(make("span", "cursor"));
    }
    this.#painter.paint(this.element.querySelectorAll(".text"), this.log);
    this.#showStats();
  }

  forget() {
    this.#painter.clear();
    this.element.remove();
  }

  // After the first chunk; NaN if that took too little time to say.
  get tokensPerSecond() {
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    return seconds < SHORTEST_S ? NaN : (this.log.numTokens - this.#numFirst) / seconds;
  }

  get firstTokenSeconds() {
    return this.#firstMs ? (this.#firstMs - this.#beganMs) / 1000 : NaN;
  }

  #showStats() {
    const { draft, forced, drawn } = this.log.counts;
    const total = this.log.numTokens;
    if (!total) return;
    const entries = [
      ["rate", `${digits(this.tokensPerSecond)} tokens/s`],
      ["first", `first token ${duration(this.firstTokenSeconds)}`],
      ["steps", `${digits(total / this.log.numSteps, 2)} tokens per step`],
      ["counts", `${total} tokens: ${draft} accepted drafts, ${forced ? `${forced} forced, ` : ""}${drawn} drawn`],
    ];
    if (this.finish === "length") entries.push(["end", "ended at the most tokens"]);
    if (this.finish === "stopped") entries.push(["end", "stopped"]);
    this.stats.replaceChildren(...entries.map(([name, text]) => make("span", name, text)));
    const parts = [["draft", draft], ["forced", forced], ["drawn", drawn]];
    this.share.replaceChildren(
      ...parts.map(([name, count]) => {
        const part = make("i", name);
        part.style.flexGrow = count;
        return part;
      }),
    );
  }
}

// What a comparison showed, as an element.
export function verdict(withDrafts, without) {
  const element = make("p", "verdict");
  const [a, b] = [withDrafts, without].map((answer) => answer.reasoning + answer.content);
  if (a === b) {
    const factor = withDrafts.tokensPerSecond / without.tokensPerSecond;
    element.classList.add("equal");
    element.append(make("b", "", `The texts are equal: ${digits(a.length, 0)} characters.`), " ");
    if (!Number.isFinite(factor)) {
      element.append("The answer was too short to compare speeds.");
      return element;
    }
    const speeds = `${digits(withDrafts.tokensPerSecond)} against ${digits(without.tokensPerSecond)} tokens/s`;
    const how = factor >= 1 ? `${digits(factor, 2)} times as fast` : `at ${digits(factor * 100, 0)} % of the speed`;
    element.append(`With drafts it was ${how} (${speeds} after the first token).`);
    return element;
  }
  let same = 0;
  while (same < Math.min(a.length, b.length) && a[same] === b[same]) same++;
  element.classList.add("differs");
  element.append(make("b", "", "The texts differ"), ` after ${digits(same, 0)} equal characters.`);
  return element;
}
