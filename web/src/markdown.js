// Model text to safe HTML: markdown, code with colours, no images and no HTML of the model's own.

import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import xml from "highlight.js/lib/languages/xml";
import { Marked } from "marked";

const languages = { bash, cpp, css, go, java, javascript, json, python, rust, sql, xml };
for (const [name, language] of Object.entries(languages)) hljs.registerLanguage(name, language);

const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ text, href }) => escape(text || href),
    checkbox: ({ checked }) => (checked ? "[x] " : "[ ] "),
  },
});
const SAFE = {
  ALLOWED_TAGS: [
    ..."p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong del a".split(" "),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "class", "start"],
  RETURN_DOM_FRAGMENT: true,
};

export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), SAFE);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const element of fragment.querySelectorAll("[class]")) {
    if (element.tagName !== "CODE") element.removeAttribute("class");
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const name = /^language-(\S+)$/.exec(code.className)?.[1] ?? "";
    code.className = "";
    if (hljs.getLanguage(name)) {
      const coloured = hljs.highlight(code.textContent, { language: name, ignoreIllegals: true });
      code.replaceChildren(DOMPurify.sanitize(coloured.value, { RETURN_DOM_FRAGMENT: true }));
    }
    const copy = document.createElement("button"); // its label is in the style sheet: no text
    copy.type = "button";
    copy.className = "copy-code";
    copy.setAttribute("aria-label", "Copy this code");
    code.parentElement.append(copy);
  }
  return fragment;
}
