// Drives Chromium for tests/e2e/browser.py: one command per line on standard input, as JSON.
// usage: node browser.mjs PLAYWRIGHT CHROMIUM PROFILE

import { createInterface } from "node:readline";

const [playwright, executablePath, profile] = process.argv.slice(2);
const { chromium } = await import(playwright);
const context = await chromium.launchPersistentContext(profile, {
  executablePath,
  headless: true,
  acceptDownloads: true,
  viewport: { width: 1440, height: 900 },
  args: [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
  ],
});
const page = context.pages()[0] ?? (await context.newPage());
let problems = [];
let requests = [];
page.on("console", (message) => {
  if (["error", "warning"].includes(message.type())) problems.push(message.text());
});
page.on("pageerror", (error) => problems.push(error.message));
page.on("request", (request) => requests.push(request.url()));

const commands = {
  open: async (url) => { await page.goto(url); },
  click: async (what) => { await page.click(what); },
  fill: async (what, text) => { await page.fill(what, text); },
  press: async (key) => { await page.keyboard.press(key); },
  value: (script) => page.evaluate(script),
  size: async (width, height) => { await page.setViewportSize({ width, height }); },
  scheme: async (colorScheme) => { await page.emulateMedia({ colorScheme }); },
  picture: async (path) => { await page.screenshot({ path }); },
  download: async (what, path) => {
    const [download] = await Promise.all([page.waitForEvent("download"), page.click(what)]);
    await download.saveAs(path);
  },
  problems: () => { const found = problems; problems = []; return found; },
  requests: () => requests,
};
console.log(JSON.stringify({ value: context.browser()?.version() ?? "chromium" }));
for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...given] = JSON.parse(line);
  try {
    console.log(JSON.stringify({ value: (await commands[name](...given)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
  }
}
await context.close();
