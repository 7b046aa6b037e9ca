// Shows where each token came from, as highlights over the rendered answer.
//
// Markdown changes the text: marks like ** are gone. So the characters of the tokens are aligned with
// those on the page, and each character on the page takes the source of the token that it came from.

const NAMES = ["draft-0", "draft-1", "forced-0", "forced-1"];
const AHEAD = 48; // characters of markup that may lie between two characters on the page
const highlights = new Map();
if (globalThis.CSS?.highlights) {
  for (const name of NAMES) {
    const highlight = new Highlight();
    highlights.set(name, highlight);
    CSS.highlights.set(name, highlight);
  }
}

// The tokens of one answer, and the steps that they came in: a step ends with a drawn token.
export class TokenLog {
  text = "";
  owner = []; // of each character of `text`: name of the highlight, or "" for a drawn token
  counts = { draft: 0, forced: 0, drawn: 0 };
  numSteps = 0;
  #isOpen = false; // a step that has drafts and no drawn token yet

  add(tokens) {
    for (const { token, source } of tokens) {
      if (!this.#isOpen) this.numSteps += 1;
      this.#isOpen = source !== "drawn";
      this.counts[source] += 1;
      const name = source === "drawn" ? "" : `${source}-${this.numSteps % 2}`;
      this.text += token;
      for (let i = 0; i < token.length; i++) this.owner.push(name);
    }
  }

  get numTokens() {
    return this.counts.draft + this.counts.forced + this.counts.drawn;
  }
}

export class Painter {
  #ranges = [];

  clear() {
    for (const [name, range] of this.#ranges) highlights.get(name).delete(range);
    this.#ranges = [];
  }

  // `roots`: the elements with the answer's text, in the order of its tokens.
  paint(roots, log) {
    this.clear();
    if (!highlights.size) return;
    let at = 0;
    for (const root of roots) {
      const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
      for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        at = this.#paintNode(node, log, at);
      }
    }
  }

  #paintNode(node, log, at) {
    const shown = node.data;
    let open = "";
    let begin = 0;
    const close = (end) => {
      if (open) this.#add(open, node, begin, end);
    };
    for (let i = 0; i < shown.length; i++) {
      const isSpace = /\s/.test(shown[i]);
      let skipped = log.text.slice(at, at + AHEAD).indexOf(shown[i]);
      if (isSpace) skipped = /\s/.test(log.text[at] ?? "x") ? 0 : -1;
      const name = skipped !== -1 ? log.owner[at + skipped] : isSpace ? open : "";
      if (skipped !== -1) at += skipped + 1;
      if (name !== open) {
        close(i);
        open = name;
        begin = i;
      }
    }
    close(shown.length);
    return at;
  }

  #add(name, node, begin, end) {
    const range = new Range();
    range.setStart(node, begin);
    range.setEnd(node, end);
    highlights.get(name).add(range);
    this.#ranges.push([name, range]);
  }
}
