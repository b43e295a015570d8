// Keys: their names, limits and usage; creating, changing, rotating and revoking keys.

import { api } from "../api.js";
import { useStore } from "../store.js";
import { t, tParts } from "../texts.js";
import {
  age,
  Badge,
  Button,
  Card,
  Code,
  confirm,
  Dialog,
  Empty,
  Facts,
  Field,
  html,
  inWords,
  Notice,
  number,
  Page,
  Table,
  toast,
  useCallback,
  useEffect,
  useState,
  when,
} from "../ui.js";

/** @import { FieldEvent } from "../ui/html.js" */

/** @type {[keyof Api.KeyLimits, string, keyof Api.KeyUsage][]} */
const LIMITS = [
  ["max_in_flight", t("Max concurrency"), "in_flight"],
  ["requests_per_minute", t("Requests a minute"), "requests_last_minute"],
  ["tokens_per_minute", t("Tokens a minute"), "tokens_last_minute"],
  ["tokens_per_day", t("Tokens a day (UTC)"), "tokens_today"],
  ["tokens_per_month", t("Tokens a month (UTC)"), "tokens_this_month"],
  ["budget_per_month", t("Budget a month (UTC)"), "cost_this_month"],
];
/** How long a new key may live: seconds, and words. */
export const EXPIRIES = [
  ["", t("Never")],
  ["3600", t("In an hour")],
  ["86400", t("In a day")],
  ["604800", t("In a week")],
  ["2592000", t("In 30 days")],
  ["31536000", t("In a year")],
];

const OVERLAPS = [
  ["0", t("None")],
  ["3600", t("An hour")],
  ["86400", "A day"],
  ["604800", "A week"],
  ["2592000", "30 days"],
];

/** @param {string} name */
const pathOf = (name) => `/v1/admin/keys/${encodeURIComponent(name)}`;

/**
 * Return a key's limits and models from the form, as the API expects them; null removes a limit.
 *
 * @param {Record<string, string>} form
 * @returns {Api.KeyChange}
 */
function tableOf(form) {
  /** @type {Api.KeyChange} */
  const table = {};
  for (const [name, title] of LIMITS) {
    const text = form[name].trim();
    const value = text === "" ? null : Number(text);
    if (Number.isNaN(value)) throw new Error(t("{title}: this is no number: {text}", { title, text }));
    table[name] = value;
  }
  const models = form.models.split(/[\s,]+/).filter(Boolean);
  return { ...table, models: models.length ? models : null };
}

/**
 * @param {Api.Key | undefined} key
 * @returns {Record<string, string>}
 */
function formOf(key) {
  const limits = Object.fromEntries(LIMITS.map(([name]) => [name, String(key?.limits[name] ?? "")]));
  return { name: "", expires: key ? "keep" : "2592000", models: (key?.models ?? []).join(", "), ...limits };
}

/** @param {{ form: Record<string, string>, set: (form: Record<string, string>) => void, of?: Api.Key }} props */
function Fields({ form, set, of }) {
  const models = useStore((all) => all.models);
  const aliases = useStore((all) => all.aliases);
  const known = [...new Set([...models.map((one) => one.id), ...aliases.map((one) => one.name)])].sort();
  const field = (/** @type {string} */ name) => ({
    value: form[name],
    onInput: (/** @type {FieldEvent} */ event) => set({ ...form, [name]: event.target.value }),
  });
  const expiries = of
    ? [["keep", of.expires_at ? t("As it is: {at}", { at: when(of.expires_at) }) : t("As it is: never")], ...EXPIRIES]
    : EXPIRIES;
  return html`<div class="form">
    ${
      !of &&
      html`<${Field} label=${t("Name")} hint=${t("As it stands in logs, limits and usage.")}>
      <input type="text" required pattern="[A-Za-z0-9._:@\\-]{1,128}" autocomplete="off" spellcheck=${false}
        ...${field("name")} /><//>`
    }
    <${Field} label=${t("Expires")}><select value=${form.expires}
      onChange=${(event) => set({ ...form, expires: event.target.value })}>
      ${expiries.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select><//>
    <${Field} wide label=${t("Models")} hint=${t(
      "Names with commas between them; empty: all, also those that come later.",
    )}>
      <input type="text" list="known-models" spellcheck=${false} placeholder=${t("all")} ...${field("models")} /><//>
    <datalist id="known-models">${known.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    ${LIMITS.map(
      ([name, title]) => html`<${Field} key=${name} label=${title}>
      <input type="text" inputmode="decimal" placeholder=${t("no limit")} ...${field(name)} /><//>`,
    )}
  </div>`;
}

/**
 * The new secret, which is shown this once.
 *
 * @param {{ of: Api.NewKey, onClose: () => void }} props
 */
function NewSecret({ of: key, onClose }) {
  return html`<${Dialog} stays title=${t("The key {name}", { name: key.name })} onClose=${onClose} actions=${html`
    <button type="button" class="button primary" onClick=${onClose}>${t("Done")}</button>`}>
    <p>${t("Give it to its owner now: it is stored nowhere, and is shown only here.")}${" "}
      ${key.old_secret_until && t("The old one is accepted until {at}.", { at: when(key.old_secret_until) })}</p>
    <div data-secret><${Code} text=${key.key} label=${t("Copy")} /></div><//>`;
}

/**
 * The dialog that gives a key another secret; then it shows that, once.
 *
 * @param {{ of: Api.Key, onClose: () => void, onDone: () => void }} props
 */
function RotateDialog({ of, onClose, onDone }) {
  const [overlap, setOverlap] = useState("86400");
  const [made, setMade] = useState(/** @type {Api.NewKey | null} */ (null));
  const [failure, setFailure] = useState("");
  const [isBusy, setBusy] = useState(false);
  const rotate = async () => {
    setBusy(true);
    try {
      setMade(await api.post(`${pathOf(of.name)}/rotate`, { overlap_s: Number(overlap) }));
      onDone();
    } catch (error) {
      setFailure(error.message);
    } finally {
      setBusy(false);
    }
  };
  if (made) return html`<${NewSecret} of=${made} onClose=${onClose} />`;
  return html`<${Dialog} title=${t("Rotate the key {name}", { name: of.name })} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>${t("Cancel")}</button>
    <button type="button" class="button primary" disabled=${isBusy} onClick=${rotate}>${t("Rotate")}</button>`}>
    ${failure && html`<${Notice} tone="bad">${failure}<//>`}
    <p>${t("The key gets another secret; its name, limits and use stay.")}${" "}
      ${of.old_secret_until && t("The secret before the current one is refused at once.")}</p>
    <div class="form"><${Field} label=${t("The current secret is accepted for")}>
      <select value=${overlap} onChange=${(event) => setOverlap(event.target.value)}>
        ${OVERLAPS.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select>
    <//></div><//>`;
}

/**
 * The dialog that creates a key, or changes the key `of`; then it shows the new key, once.
 *
 * @param {{ of?: Api.Key, onClose: () => void, onDone: () => void }} props
 */
function KeyDialog({ of, onClose, onDone }) {
  const [form, setForm] = useState(formOf(of));
  const [made, setMade] = useState(/** @type {Api.NewKey | null} */ (null));
  const [failure, setFailure] = useState("");
  const [isBusy, setBusy] = useState(false);
  const save = async () => {
    setFailure("");
    setBusy(true);
    try {
      const table = tableOf(form);
      if (form.expires === "") table.expires_at = null;
      else if (form.expires !== "keep") table.expires_in_s = Number(form.expires);
      if (of) {
        await api.patch(pathOf(of.name), table);
        toast(t("The key {name} is changed.", { name: of.name }));
        onClose();
      } else {
        const given = Object.fromEntries(Object.entries(table).filter(([, value]) => value !== null));
        setMade(await api.post("/v1/admin/keys", { name: form.name.trim(), ...given }));
      }
      onDone();
    } catch (error) {
      setFailure(error.message);
    } finally {
      setBusy(false);
    }
  };
  if (made) return html`<${NewSecret} of=${made} onClose=${onClose} />`;
  const title = of ? t("Change the key {name}", { name: of.name }) : t("Create a key");
  return html`<${Dialog} wide title=${title} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>${t("Cancel")}</button>
    <button type="button" class="button primary" disabled=${isBusy || (!of && !form.name.trim())} onClick=${save}>
      ${of ? t("Change") : t("Create the key")}</button>`}>
    ${failure && html`<${Notice} tone="bad">${failure}<//>`}
    <${Fields} form=${form} set=${setForm} of=${of} /><//>`;
}

/**
 * @param {Api.Key} key
 * @param {(typeof LIMITS)[number]} limit
 */
const limitOf = (key, [name, , used]) => {
  const limit = key.limits[name];
  const now = key.usage_now[used];
  if (limit === null)
    return now === null || now === undefined ? t("no limit") : t("{now}, no limit", { now: number(now) });
  return t("{now} of {limit}", { now: number(now), limit: number(limit) });
};

/** @param {{ of: Api.Key, onClose: () => void, change: () => void, rotate: () => void, revoke: () => void }} props */
function Details({ of: key, onClose, change, rotate, revoke }) {
  const facts = [
    [t("State"), inWords(key.state)],
    [t("From"), key.source === "file" ? t("the configuration") : t("the API")],
    [t("Created"), key.made_at && when(key.made_at)],
    [t("Expires"), key.expires_at ? when(key.expires_at) : t("never")],
    [t("Old secret until"), key.old_secret_until && when(key.old_secret_until)],
    [t("Models"), key.models ? key.models.join(", ") : t("all")],
    [t("May read /metrics"), key.metrics ? t("yes") : t("no")],
    [t("May steer engines"), key.engine_control ? t("yes") : t("no")],
    ...LIMITS.map((limit) => [limit[1], limitOf(key, limit)]),
  ];
  const isMade = key.source === "api";
  return html`<${Dialog} title=${t("The key {name}", { name: key.name })} onClose=${onClose} actions=${html`
    ${
      isMade &&
      html`<${Button} tone="danger" onClick=${revoke}>${t("Revoke")}<//><span class="spring"></span>
    <${Button} onClick=${rotate}>${t("Rotate")}<//>
    <${Button} onClick=${change}>${t("Change")}<//>`
    }
    <${Button} onClick=${onClose}>${t("Close")}<//>`}>
    <${Facts} facts=${facts} />
    ${
      !isMade &&
      html`<p class="hint">${tParts("It is in ichat.toml ({table}), and is changed there.", {
        table: html`<code>[[security.keys]]</code>`,
      })}</p>`
    }<//>`;
}

/** @type {import("../ui/table.js").Column<Api.Key>[]} */
const COLUMNS = [
  {
    name: "name",
    title: t("Name"),
    value: (key) => key.name,
    cell: (key) => html`<b class="clip" title=${key.name}>${key.name}</b>`,
  },
  {
    name: "state",
    title: t("State"),
    value: (key) => key.state,
    cell: ({ state }) => html`<${Badge} tone=${state === "active" ? "ok" : "warn"}>${inWords(state)}<//>`,
  },
  {
    name: "source",
    title: t("From"),
    value: (key) => key.source,
    extra: true,
    cell: ({ source }) => (source === "file" ? t("configuration") : "API"),
  },
  {
    name: "models",
    title: t("Models"),
    extra: true,
    cell: ({ models }) => html`<span class="long">${models ? models.join(", ") : t("all")}</span>`,
  },
  {
    name: "in_flight",
    title: t("Under way"),
    align: "right",
    value: (key) => key.usage_now.in_flight,
    cell: (key) => number(key.usage_now.in_flight),
  },
  {
    name: "month",
    title: t("Tokens this month"),
    align: "right",
    extra: true,
    value: (key) => key.usage_now.tokens_this_month ?? null,
    cell: (key) => limitOf(key, LIMITS[4]),
  },
  { name: "used", title: t("Last used"), value: (key) => key.last_used_at, cell: (key) => age(key.last_used_at) },
  {
    name: "expires",
    title: t("Expires"),
    value: (key) => key.expires_at,
    cell: ({ expires_at: at }) => (at ? when(at) : t("never")),
  },
];

/** Clients' keys. */
export default function Keys() {
  const version = useStore((all) => all.keysVersion);
  const begun = useStore((all) => all.begun);
  const [answer, setAnswer] = useState(/** @type {Api.Keys | null} */ (null));
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const [open, setOpen] = useState(
    /** @type {{ is: "create" | "change" | "details" | "rotate", key?: Api.Key } | null} */ (null),
  );
  const [text, setText] = useState("");
  const read = useCallback(
    () =>
      api.get("/v1/admin/keys").then((found) => {
        setAnswer(found);
        setFailure(null);
      }, setFailure),
    [],
  );
  useEffect(() => void read(), [version, begun]);
  const close = () => setOpen(null);
  const revoke = async (/** @type {Api.Key} */ key) => {
    const text = t("Its next request is refused; what is under way goes on. The name can be given again.");
    if (
      !(await confirm({
        title: t("Revoke the key {name}?", { name: key.name }),
        text,
        action: t("Revoke"),
        danger: true,
      }))
    )
      return;
    await api.del(pathOf(key.name));
    toast(t("The key {name} is revoked.", { name: key.name }));
    close();
    await read();
  };
  const words = (/** @type {Api.Key} */ key) => [key.name, key.state, ...(key.models ?? [])];
  const has = (/** @type {Api.Key} */ key) =>
    words(key).some((word) => word.toLowerCase().includes(text.toLowerCase()));
  const make = html`<input type="search" aria-label=${t("Find keys")} placeholder=${t("Find ( / )")} value=${text}
      onInput=${(event) => setText(event.target.value)} />
    <${Button} tone="primary" icon="keys" onClick=${() => setOpen({ is: "create" })}>${t("Create a key")}<//>`;
  return html`<${Page} title=${t("Keys")} actions=${make}
    lead=${t(
      "Each client has a key of its own, with its models and limits. The gateway knows a key only by its hash.",
    )}>
    ${failure && html`<${Notice} tone="bad">${failure.message}<//>`}
    ${
      answer &&
      !answer.keys_needed &&
      html`<${Notice}>${t("There are no keys: whoever reaches this port may use the models.")}<//>`
    }
    ${
      answer &&
      html`<${Card} flush><${Table} label=${t("Keys")} columns=${COLUMNS}
      rows=${answer.keys.filter(has)} sort="name"
      keyOf=${(/** @type {Api.Key} */ key) => key.name} onOpen=${(/** @type {Api.Key} */ key) =>
        setOpen({ is: "details", key })}
      empty=${
        text
          ? t("No key is like that.")
          : html`<${Empty} icon="keys" title=${t("No keys")}>
        <p>${t("With the first key, every client needs one.")}</p><//>`
      } /><//>`
    }
    ${open?.is === "create" && html`<${KeyDialog} onClose=${close} onDone=${read} />`}
    ${open?.is === "change" && html`<${KeyDialog} of=${open.key} onClose=${close} onDone=${read} />`}
    ${
      open?.is === "details" &&
      html`<${Details} of=${open.key} onClose=${close} revoke=${() => open.key && revoke(open.key)}
      rotate=${() => setOpen({ is: "rotate", key: open.key })}
      change=${() => setOpen({ is: "change", key: open.key })} />`
    }
    ${open?.is === "rotate" && html`<${RotateDialog} of=${open.key} onClose=${close} onDone=${read} />`}<//>`;
}
