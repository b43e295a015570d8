// The console's texts in the reader's language. An English text is its own key, as in gettext.

/** @import { ComponentChildren } from "preact" */

const KEPT = "ichat.language";
const HOLE = /\{(\w+)\}/g;

/**
 * The languages of the console: the page's `lang` attribute, and their names for themselves.
 *
 * @type {Record<string, { tag: string, name: string, short: string }>}
 */
const LANGUAGES = {
  en: { tag: "en", name: "English", short: "EN" },
  zh: { tag: "zh-CN", name: "中文", short: "中" },
};

/**
 * Return the language of the console for the chosen language, if there is one, and the browser's languages.
 *
 * @param {string | null} chosen
 * @param {readonly string[]} wanted
 */
export function languageOf(chosen, wanted) {
  if (chosen !== null && Object.hasOwn(LANGUAGES, chosen)) return chosen;
  const codes = wanted.map((tag) => tag.toLowerCase().split("-")[0]);
  return codes.find((code) => Object.hasOwn(LANGUAGES, code)) ?? "en";
}

/** The language that the console has now. */
export const language = languageOf(localStorage.getItem(KEPT), navigator.languages);
/** @type {Record<string, string>} */
const texts = language === "zh" ? await import("./texts.zh.js").then((file) => file.default).catch(() => ({})) : {};
document.documentElement.lang = LANGUAGES[language].tag;

/** The other language, which the header offers. */
export const otherLanguage = language === "en" ? { code: "zh", ...LANGUAGES.zh } : { code: "en", ...LANGUAGES.en };

/**
 * Keep another language for this browser, and load the page again.
 *
 * @param {string} code
 */
export function chooseLanguage(code) {
  localStorage.setItem(KEPT, code);
  location.reload();
}

/**
 * Return a text in the reader's language, with values in its holes: `t("{id} is ready", { id })`.
 *
 * @param {string} text
 * @param {Record<string, unknown>} [holes]
 */
export function t(text, holes) {
  const found = texts[text] ?? text;
  return holes ? found.replace(HOLE, (_, name) => String(holes[name])) : found;
}

/**
 * Return a text in the reader's language as the parts of a template, with nodes in its holes.
 *
 * @param {string} text
 * @param {Record<string, ComponentChildren>} holes
 * @returns {ComponentChildren[]}
 */
export const tParts = (text, holes) =>
  (texts[text] ?? text).split(HOLE).map((part, at) => (at % 2 ? holes[part] : part));

/**
 * Return `1 worker` or `2 workers`: the text for a single thing, else the text for many, with values in its holes.
 *
 * Chinese has no plural: there the text for many is always meant.
 *
 * @param {number} value
 * @param {string} single
 * @param {string} many
 * @param {Record<string, unknown>} holes
 */
export const tPlural = (value, single, many, holes) => t(value === 1 && language === "en" ? single : many, holes);

/**
 * Return sentences as a text; empty sentences are left out. Chinese has no space between sentences.
 *
 * @param {(string | false | null | undefined)[]} parts
 */
export const sentences = (...parts) => parts.filter(Boolean).join(language === "zh" ? "" : " ");
