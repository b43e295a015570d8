// The console's shell: navigation, theme, keyboard, the operator's key, and the message when the gateway is not there.

import { asKey, setAdminKey } from "./api.js";
import { PAGES } from "./pages/index.js";
import { forgetChat } from "./pages/playground/chat.js";
import { go, hrefOf, useRoute } from "./router.js";
import { hasKey, login, reconnect, useStore } from "./store.js";
import { chooseLanguage, otherLanguage, t, tParts } from "./texts.js";
import {
  Button,
  Dialog,
  duration,
  Empty,
  Field,
  Guard,
  html,
  Icon,
  Notice,
  Overlays,
  Page,
  render,
  timeOfDay,
  useEffect,
  useLayoutEffect,
  useRef,
  useState,
  useTick,
} from "./ui.js";

/** @import { ApiError } from "./api.js" */
/** @import { State } from "./store.js" */

const SHORTCUT_MS = 1500;

/** @param {KeyboardEvent} event */
function isTyping(event) {
  return (
    /** @type {Partial<Element>} */ (event.target).closest?.("input, textarea, select, [contenteditable], dialog") !==
    null
  );
}

/**
 * Letters: `g` and a page's letter go to it, `/` finds, `t` changes the theme, `?` shows this.
 *
 * @param {{ showHelp: () => void, turnTheme: () => void }} what
 */
function useShortcuts({ showHelp, turnTheme }) {
  useEffect(() => {
    let went = 0;
    const press = (/** @type {KeyboardEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
      const page = Date.now() - went < SHORTCUT_MS && PAGES.find((one) => one.key === event.key);
      went = event.key === "g" ? Date.now() : 0;
      if (page) go(page.name);
      else if (event.key === "?") showHelp();
      else if (event.key === "t") turnTheme();
      else if (event.key === "/") {
        const field = /** @type {HTMLElement | null} */ (document.querySelector("main [type=search]"));
        field?.focus();
        if (field) event.preventDefault();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function turnTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("ichat.theme", root.dataset.theme);
  dispatchEvent(new Event("ichat-theme"));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("ichat-theme")));

/** @param {{ current?: string, isOpen: boolean, close: () => void }} props */
function Navigation({ current, isOpen, close }) {
  const groups = [...new Set(PAGES.map((page) => page.group))];
  return html`<nav id="navigation" class=${isOpen ? "open" : ""} aria-label=${t("Pages")} onClick=${close}>
    ${groups.map(
      (group) => html`<div key=${group} class="nav-group"><h2>${group}</h2>
      ${PAGES.filter((page) => page.group === group).map(
        (page) => html`<a key=${page.name} href=${hrefOf(page.name)}
        aria-current=${page.name === current ? "page" : undefined} title=${`g ${page.key}`}>
        <${Icon} name=${page.icon ?? page.name} />${page.title}</a>`,
      )}</div>`,
    )}
  </nav>`;
}

/** @type {Record<State["connection"], [string, string]>} */
const CONNECTIONS = {
  live: ["ok", t("Live")],
  connecting: ["busy", t("Connecting")],
  lost: ["bad", t("Not connected")],
  denied: ["warn", t("Locked")],
};

function Connection() {
  const connection = useStore((all) => all.connection);
  const gateway = useStore((all) => all.gateway);
  const lostAt = useStore((all) => all.lostAt);
  useTick();
  const [tone, text] = CONNECTIONS[connection];
  const isOld = connection === "lost";
  const uptime = gateway && gateway.uptime_s + ((isOld && lostAt ? lostAt : Date.now()) - gateway.seen_at) / 1000;
  const holes = { uptime: duration(uptime), at: timeOfDay((lostAt ?? 0) / 1000) };
  const uptimeWords = isOld ? t("as of {at}: up {uptime}", holes) : t("up {uptime}", holes);
  return html`<div class="connection" data-connection=${connection}>
    <span><i class=${`dot ${tone}`}></i>${text}</span>
    ${gateway && html`<span class=${isOld ? "muted old" : "muted"}>iChat ${gateway.version} · ${uptimeWords}</span>`}
  </div>`;
}

/** Forget the keys, and the answers that were requested with them. */
function lock() {
  forgetChat();
  sessionStorage.clear();
  location.reload();
}

const UNKNOWN = t("The gateway does not know this key.");

/**
 * Asks for the operator's key, or says why none would help.
 *
 * @param {{ error: ApiError }} props
 */
function Locked({ error }) {
  const [key, setKey] = useState("");
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useLayoutEffect(() => field.current?.focus(), []);
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    login(asKey(key));
  };
  if (error.status === 403 && !hasKey()) {
    return html`<${Empty} icon="lock" title=${t("This page is for operators")}><p>${error.message}</p><//>`;
  }
  return html`<form class="login card" onSubmit=${submit}>
    <${Icon} name="lock" size=${28} />
    <h1>${t("Operator's key")}</h1>
    <p class="hint">${tParts(
      "The key of {variable} or {hash}; where there is none, open the link that {command} " +
        "prints. It stays in this tab and is forgotten when the tab closes.",
      {
        variable: html`<code>security.admin_key_env</code>`,
        hash: html`<code>admin_key_hash</code>`,
        command: html`<code>./ichat.pyz console</code>`,
      },
    )}</p>
    <${Field} label=${t("Key")} error=${hasKey() ? (error.status === 403 ? error.message : UNKNOWN) : ""}>
      <input ref=${field} type="password" aria-label=${t("Key")} autocomplete="off" spellcheck="false" value=${key}
        onInput=${(event) => setKey(event.target.value)} required /><//>
    <button class="button primary" type="submit">${t("Open")}</button>
  </form>`;
}

/** @param {{ error: ApiError | null }} props */
function Lost({ error }) {
  const lostAt = useStore((all) => all.lostAt);
  return html`<${Notice} tone="bad" title=${t("No connection to the gateway.")}
    actions=${html`<${Button} small onClick=${() => reconnect()}>${t("Try now")}<//>`}>
    ${error?.message} ${
      lostAt
        ? t("What you see is as of {at}; this page connects again by itself.", { at: timeOfDay(lostAt / 1000) })
        : t("This page connects again by itself.")
    }<//>`;
}

/** @param {{ onClose: () => void }} props */
function Help({ onClose }) {
  return html`<${Dialog} title=${t("Keyboard")} onClose=${onClose} actions=${html`<button type="button" class="button"
    onClick=${onClose}>${t("Close")}</button>`}><dl class="facts keys-help">
    ${PAGES.map(
      (page) => html`<div key=${page.name}><dt><kbd>g</kbd> <kbd>${page.key}</kbd></dt>
      <dd>${page.title}</dd></div>`,
    )}
    <div><dt><kbd>/</kbd></dt><dd>${t("Find on this page")}</dd></div>
    <div><dt><kbd>↑</kbd> <kbd>↓</kbd> <kbd>Enter</kbd></dt><dd>${t("Walk through a table, open a row")}</dd></div>
    <div><dt><kbd>t</kbd></dt><dd>${t("Dark or light")}</dd></div>
    <div><dt><kbd>?</kbd></dt><dd>${t("This list")}</dd></div></dl><//>`;
}

function Shell() {
  const route = useRoute();
  const connection = useStore((all) => all.connection);
  const error = useStore((all) => all.error);
  const hasState = useStore((all) => all.gateway !== null);
  const [isOpen, setOpen] = useState(false);
  const [hasHelp, setHelp] = useState(false);
  useShortcuts({ showHelp: () => setHelp(true), turnTheme });
  // Before the page is painted: later, it could move the focus away from a field that the reader has chosen since.
  useLayoutEffect(() => {
    scrollTo(0, 0);
    /** @type {HTMLElement | null} */ (document.querySelector("main h1"))?.focus({ preventScroll: true });
  }, [route.name, route.rest.join("/")]);
  const found = PAGES.find((page) => page.name === (route.name || "overview"));
  const content = () => {
    if (connection === "denied") return html`<${Locked} key=${error?.message} error=${error} />`;
    if (!found)
      return html`<${Page} title=${t("There is no such page")}><p><a href="#/overview">${t("Overview")}</a></p><//>`;
    if (!hasState)
      return connection === "lost" ? null : html`<div class="loading" role="status">${t("Connecting…")}</div>`;
    const place = [route.name, ...route.rest].join("/");
    return html`<${Guard} key=${place}><${found.page} key=${place} params=${route} /><//>`;
  };
  return html`<a class="skip" href="#main" onClick=${(event) => {
    event.preventDefault();
    document.querySelector("main")?.focus();
  }}>${t("To the content")}</a>
  <header class="bar">
    <button type="button" class="icon-button only-narrow" aria-label=${t("Pages")} aria-expanded=${isOpen}
      aria-controls="navigation" onClick=${() => setOpen(!isOpen)}>
      <${Icon} name=${isOpen ? "close" : "menu"} /></button>
    <a class="brand" href="#/overview"><img src="icon.svg" alt="" width="22" height="22" />iChat</a>
    <span class="spring"></span>
    <${Connection} />
    <button type="button" class="icon-button" title=${t("Dark or light (t)")} aria-label=${t("Dark or light")}
      onClick=${turnTheme}>
      <${Icon} name="theme" /></button>
    <button type="button" class="icon-button" title=${t("Keyboard (?)")} aria-label=${t("Keyboard")} onClick=${() =>
      setHelp(true)}>
      <kbd>?</kbd></button>
    <button type="button" class="icon-button" lang=${otherLanguage.tag} title=${otherLanguage.name}
      aria-label=${`${otherLanguage.short}: ${otherLanguage.name}`}
      onClick=${() => chooseLanguage(otherLanguage.code)}>${otherLanguage.short}</button>
    ${hasKey() && html`<${Button} small tone="quiet" icon="lock" onClick=${lock}>${t("Lock")}<//>`}
  </header>
  <div class="frame">
    <${Navigation} current=${found?.name} isOpen=${isOpen} close=${() => setOpen(false)} />
    <main id="main" tabindex="-1">
      ${connection === "lost" && html`<${Lost} error=${error} />`}
      ${content()}
    </main>
  </div>
  ${hasHelp && html`<${Help} onClose=${() => setHelp(false)} />`}
  <${Overlays} />`;
}

/** Read the secret from a link that the gateway has printed, and remove it from the address: the browser keeps that. */
function takeKey() {
  const given = /^#key=([\w-]+)$/.exec(location.hash);
  if (!given) return false;
  setAdminKey(given[1]);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

addEventListener("hashchange", () => takeKey() && location.reload());
takeKey();
reconnect();
render(html`<${Shell} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
