// Colours of syntax in blocks of code, by highlight.js. The first block loads it.

import DOMPurify from "dompurify";

/** The library's time grows with the square of a hostile text's length, and of its lines. */
const LENGTH_MAX = 8000;
const LINE_MAX = 300;
const RULES = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false };
/** The library's files of languages, by the names that blocks have. @type {Record<string, string>} */
const LANGUAGES = {
  bash: "bash",
  sh: "bash",
  shell: "bash",
  zsh: "bash",
  console: "bash",
  c: "cpp",
  "c++": "cpp",
  cc: "cpp",
  cpp: "cpp",
  cuda: "cpp",
  diff: "diff",
  patch: "diff",
  go: "go",
  golang: "go",
  java: "java",
  javascript: "javascript",
  js: "javascript",
  jsx: "javascript",
  json: "json",
  jsonc: "json",
  python: "python",
  py: "python",
  rust: "rust",
  rs: "rust",
  sql: "sql",
  typescript: "typescript",
  ts: "typescript",
  tsx: "typescript",
  html: "xml",
  svg: "xml",
  xml: "xml",
  yaml: "yaml",
  yml: "yaml",
};

/** The library, once it is there. @type {any} */
let library = null;
/** @type {Map<string, Promise<unknown>>} */
const loading = new Map();

/**
 * Load the library and a language; a file that does not arrive leaves blocks without colours.
 *
 * @param {string} language
 */
async function load(language) {
  const [core, grammar] = await Promise.all([
    import(`./vendor/${"core"}.min.js`),
    import(`./vendor/${language}.min.js`),
  ]);
  core.default.registerLanguage(language, grammar.default);
  library = core.default;
}

/**
 * Return whether a text is short enough to be coloured in a moment.
 *
 * @param {string} text
 */
export const isShort = (text) => text.length <= LENGTH_MAX && text.split("\n").every((line) => line.length <= LINE_MAX);

/**
 * Colour a block of code in a known language: at once, if that language is loaded.
 *
 * @param {Element} code
 * @param {string} name
 */
export function colour(code, name) {
  const language = Object.hasOwn(LANGUAGES, name.toLowerCase()) ? LANGUAGES[name.toLowerCase()] : "";
  const text = code.textContent ?? "";
  if (!language || !isShort(text)) return;
  if (library?.getLanguage(language)) paint(code, text, language);
  else {
    if (!loading.has(language))
      loading.set(
        language,
        load(language).catch(() => {}),
      );
    loading
      .get(language)
      ?.then(() => code.isConnected && library?.getLanguage(language) && paint(code, text, language));
  }
}

/**
 * Put a text into an element, in colours, with the same characters.
 *
 * @param {Element} code
 * @param {string} text
 * @param {string} language
 */
function paint(code, text, language) {
  const { value } = library.highlight(text, { language, ignoreIllegals: true });
  const nodes = DOMPurify.sanitize(value, { ...RULES, RETURN_DOM_FRAGMENT: true });
  if (nodes.textContent === text) code.replaceChildren(nodes);
}
