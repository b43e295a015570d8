// Before the tests: what the console's pure modules need of a browser, and its import map. Used by `node --import`.

import { readFileSync } from "node:fs";
import { registerHooks } from "node:module";

const ROOT = new URL("../../../", import.meta.url);
const CONSOLE = new URL("ichat/console/", ROOT);
const VENDOR = new URL(".build/console/vendor/", ROOT);
const page = readFileSync(new URL("index.html", CONSOLE), "utf8");
const { imports } = JSON.parse(/<script type="importmap">(.*?)<\/script>/s.exec(page)[1]);

globalThis.document = { baseURI: "http://gateway/console/", documentElement: {} };
globalThis.location = { hash: "" };
globalThis.sessionStorage = { getItem: () => null };
globalThis.localStorage = { getItem: (name) => (name === "ichat.language" ? "en" : null) };
if (!globalThis.navigator) globalThis.navigator = { languages: [] };

registerHooks({
  resolve(specifier, context, next) {
    if (specifier in imports) return next(new URL(imports[specifier].replace("./vendor/", ""), VENDOR).href, context);
    const name = specifier.startsWith("console/")
      ? new URL(specifier.slice("console/".length), CONSOLE).href
      : specifier;
    const found = next(name, context);
    return found.url.startsWith(CONSOLE.href) ? { ...found, format: "module" } : found;
  },
});
