// The conversation: messages, settings, stop, regenerate, copy, and the comparison.

import { Answer, verdict } from "./answer.js";
import { byId, button, copyText, make } from "./dom.js";

const EXAMPLES = [
  ["Rewrite a function", "Add a docstring to this function and print the whole function again:\n\n```python\ndef running_mean(values, width):\n    total = 0.0\n    means = []\n    for index, value in enumerate(values):\n        total += value\n        if index >= width:\n            total -= values[index - width]\n        means.append(total / min(index + 1, width))\n    return means\n```"],
  ["Repeat a list", "Write this list again, in the same order:\n\n1. Mercury is the planet closest to the sun.\n2. Venus is the hottest planet.\n3. Earth is the planet we live on.\n4. Mars is called the red planet.\n5. Jupiter is the largest planet."],
  ["Explain something", "Explain in a few sentences why the sky is blue."],
];

export class Chat {
  #turns = []; // {question, answers, element}
  #abort = null;

  constructor() {
    this.log = byId("log");
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    this.prompt.addEventListener("input", () => this.#fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.#clear());
    this.log.addEventListener("click", (event) => {
      if (event.target.matches(".copy-code")) {
        copyText(event.target.parentElement.querySelector("code").textContent);
        confirmCopy(event.target);
      }
    });
    const shows = byId("shows-sources");
    shows.addEventListener("change", () => document.body.classList.toggle("plain", !shows.checked));
    for (const [title, text] of EXAMPLES) {
      byId("examples").append(button(title, "example", () => {
        this.prompt.value = text;
        this.#fit();
        this.prompt.focus();
      }));
    }
  }

  stop() {
    this.#abort?.abort();
  }

  get isBusy() {
    return this.#abort !== null;
  }

  #send() {
    const question = this.prompt.value.trim();
    if (!question || this.isBusy) return;
    this.prompt.value = "";
    this.#fit();
    byId("welcome").hidden = true;
    const element = make("div", "turn");
    element.append(make("div", "question", question));
    this.log.append(element);
    this.#ask({ question, answers: [], element });
  }

  #regenerate() {
    const turn = this.#turns.pop();
    for (const answer of turn.answers) answer.forget();
    turn.answers = [];
    turn.element.querySelector(".result")?.remove();
    this.#ask(turn);
  }

  async #ask(turn) {
    const mode = document.querySelector("input[name=drafts]:checked").value;
    const body = this.#body(turn.question);
    const runs = { with: [["", {}]], without: [["", { num_speculative_tokens: 0 }]] };
    runs.compare = [["With drafts", {}], ["Without drafts", { num_speculative_tokens: 0 }]];
    if (mode === "compare") body.seed ??= Math.floor(Math.random() * 2 ** 31);
    for (const old of this.log.querySelectorAll("button.again")) old.remove();
    const result = make("div", `result ${mode}`);
    turn.element.append(result);
    this.#turns.push(turn);
    this.#setBusy(new AbortController());
    try {
      for (const [title, fields] of runs[mode]) {
        const answer = new Answer(title);
        turn.answers.push(answer);
        result.append(answer.element);
        const follow = setInterval(() => this.#follow(), 100);
        await answer.run({ ...body, ...fields }, this.#abort.signal).finally(() => clearInterval(follow));
      }
      if (mode === "compare") result.prepend(verdict(...turn.answers));
    } catch (error) {
      if (error.name !== "AbortError") result.append(make("p", "error", messageOf(error)));
    } finally {
      result.append(this.#actions(turn));
      this.#setBusy(null);
      this.#follow();
      this.prompt.focus({ preventScroll: true });
    }
  }

  #body(question) {
    const body = { messages: [] };
    const system = byId("system").value.trim();
    if (system) body.messages.push({ role: "system", content: system });
    for (const turn of this.#turns) {
      body.messages.push({ role: "user", content: turn.question });
      const content = turn.answers[0]?.content;
      if (content) body.messages.push({ role: "assistant", content });
    }
    body.messages.push({ role: "user", content: question });
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      const value = byId(name).value;
      if (value !== "") body[name] = Number(value);
    }
    return body;
  }

  #actions(turn) {
    const actions = make("div", "actions");
    const copy = button("Copy", "small", () => {
      copyText(turn.answers[0]?.content ?? "");
      confirmCopy(copy);
    });
    const again = button("Regenerate", "small again", () => this.isBusy || this.#regenerate());
    actions.append(copy, again);
    return actions;
  }

  #setBusy(abort) {
    this.#abort = abort;
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 160) this.log.scrollTop = scrollHeight;
  }

  #fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight + 2, 220)}px`;
  }

  #clear() {
    this.stop();
    for (const turn of this.#turns) for (const answer of turn.answers) answer.forget();
    for (const element of this.log.querySelectorAll(".turn")) element.remove();
    this.#turns = [];
    byId("welcome").hidden = false;
    this.prompt.focus();
  }
}

const messageOf = (error) =>
  error instanceof TypeError ? "The connection to the server was lost." : error.message;

function confirmCopy(element) {
  element.classList.add("done");
  setTimeout(() => element.classList.remove("done"), 1200);
}
