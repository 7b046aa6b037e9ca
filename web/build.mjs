// Builds the page. usage: node build.mjs [FOLDER]; the default is where the server looks.
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";

const here = new URL(".", import.meta.url).pathname;
const out = process.argv[2] ?? `${here}../paceline/server/page`;
await mkdir(out, { recursive: true });
await build({
  entryPoints: [`${here}src/app.js`, `${here}src/app.css`],
  outdir: out,
  absWorkingDir: here,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome123", "firefox128", "safari17.5"],
  legalComments: "inline", // the licences of the libraries travel with them
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(`${here}src/${name}`, `${out}/${name}`);
