// Keys: their names, limits and usage; creating, changing, rotating and revoking keys.

import { api } from "../api.js";
import { useStore } from "../store.js";
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
  ["max_in_flight", "Max concurrency", "in_flight"],
  ["requests_per_minute", "Requests a minute", "requests_last_minute"],
  ["tokens_per_minute", "Tokens a minute", "tokens_last_minute"],
  ["tokens_per_day", "Tokens a day (UTC)", "tokens_today"],
  ["tokens_per_month", "Tokens a month (UTC)", "tokens_this_month"],
  ["budget_per_month", "Budget a month (UTC)", "cost_this_month"],
];
/** How long a new key may live: seconds, and words. */
export const EXPIRIES = [
  ["", "Never"],
  ["3600", "In an hour"],
  ["86400", "In a day"],
  ["604800", "In a week"],
  ["2592000", "In 30 days"],
  ["31536000", "In a year"],
];

const OVERLAPS = [
  ["0", "None"],
  ["3600", "An hour"],
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
    if (Number.isNaN(value)) throw new Error(`${title}: this is no number: ${text}`);
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
    ? [["keep", of.expires_at ? `As it is: ${when(of.expires_at)}` : "As it is: never"], ...EXPIRIES]
    : EXPIRIES;
  return html`<div class="form">
    ${
      !of &&
      html`<${Field} label="Name" hint="As it stands in logs, limits and usage.">
      <input type="text" required pattern="[A-Za-z0-9._:@\\-]{1,128}" autocomplete="off" spellcheck=${false}
        ...${field("name")} /><//>`
    }
    <${Field} label="Expires"><select value=${form.expires}
      onChange=${(event) => set({ ...form, expires: event.target.value })}>
      ${expiries.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select><//>
    <${Field} wide label="Models" hint="Names with commas between them; empty: all, also those that come later.">
      <input type="text" list="known-models" spellcheck=${false} placeholder="all" ...${field("models")} /><//>
    <datalist id="known-models">${known.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    ${LIMITS.map(
      ([name, title]) => html`<${Field} key=${name} label=${title}>
      <input type="text" inputmode="decimal" placeholder="no limit" ...${field(name)} /><//>`,
    )}
  </div>`;
}

/**
 * The new secret, which is shown this once.
 *
 * @param {{ of: Api.NewKey, onClose: () => void }} props
 */
function NewSecret({ of: key, onClose }) {
  return html`<${Dialog} stays title=${`The key ${key.name}`} onClose=${onClose} actions=${html`
    <button type="button" class="button primary" onClick=${onClose}>Done</button>`}>
    <p>Give it to its owner now: it is stored nowhere, and is shown only here.
      ${key.old_secret_until && ` The old one is accepted until ${when(key.old_secret_until)}.`}</p>
    <div data-secret><${Code} text=${key.key} label="Copy" /></div><//>`;
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
  return html`<${Dialog} title=${`Rotate the key ${of.name}`} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>Cancel</button>
    <button type="button" class="button primary" disabled=${isBusy} onClick=${rotate}>Rotate</button>`}>
    ${failure && html`<${Notice} tone="bad">${failure}<//>`}
    <p>The key gets another secret; its name, limits and use stay.
      ${of.old_secret_until && " The secret before the current one is refused at once."}</p>
    <div class="form"><${Field} label="The current secret is accepted for">
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
        toast(`The key ${of.name} is changed.`);
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
  const title = of ? `Change the key ${of.name}` : "Create a key";
  return html`<${Dialog} wide title=${title} onClose=${onClose} actions=${html`
    <button type="button" class="button" onClick=${onClose}>Cancel</button>
    <button type="button" class="button primary" disabled=${isBusy || (!of && !form.name.trim())} onClick=${save}>
      ${of ? "Change" : "Create the key"}</button>`}>
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
  if (limit === null) return now === null || now === undefined ? "no limit" : `${number(now)}, no limit`;
  return `${number(now)} of ${number(limit)}`;
};

/** @param {{ of: Api.Key, onClose: () => void, change: () => void, rotate: () => void, revoke: () => void }} props */
function Details({ of: key, onClose, change, rotate, revoke }) {
  const facts = [
    ["State", key.state],
    ["From", key.source === "file" ? "the configuration" : "the API"],
    ["Created", key.made_at && when(key.made_at)],
    ["Expires", key.expires_at ? when(key.expires_at) : "never"],
    ["Old secret until", key.old_secret_until && when(key.old_secret_until)],
    ["Models", key.models ? key.models.join(", ") : "all"],
    ["May read /metrics", key.metrics ? "yes" : "no"],
    ["May steer engines", key.engine_control ? "yes" : "no"],
    ...LIMITS.map((limit) => [limit[1], limitOf(key, limit)]),
  ];
  const isMade = key.source === "api";
  return html`<${Dialog} title=${`The key ${key.name}`} onClose=${onClose} actions=${html`
    ${
      isMade &&
      html`<${Button} tone="danger" onClick=${revoke}>Revoke<//><span class="spring"></span>
    <${Button} onClick=${rotate}>Rotate<//>
    <${Button} onClick=${change}>Change<//>`
    }
    <${Button} onClick=${onClose}>Close<//>`}>
    <${Facts} facts=${facts} />
    ${
      !isMade &&
      html`<p class="hint">It is in ichat.toml (<code>[[security.keys]]</code>), and is changed
      there.</p>`
    }<//>`;
}

/** @type {import("../ui/table.js").Column<Api.Key>[]} */
const COLUMNS = [
  {
    name: "name",
    title: "Name",
    value: (key) => key.name,
    cell: (key) => html`<b class="clip" title=${key.name}>${key.name}</b>`,
  },
  {
    name: "state",
    title: "State",
    value: (key) => key.state,
    cell: ({ state }) => html`<${Badge} tone=${state === "active" ? "ok" : "warn"}>${state}<//>`,
  },
  {
    name: "source",
    title: "From",
    value: (key) => key.source,
    extra: true,
    cell: ({ source }) => (source === "file" ? "configuration" : "API"),
  },
  {
    name: "models",
    title: "Models",
    extra: true,
    cell: ({ models }) => html`<span class="long">${models ? models.join(", ") : "all"}</span>`,
  },
  {
    name: "in_flight",
    title: "Under way",
    align: "right",
    value: (key) => key.usage_now.in_flight,
    cell: (key) => number(key.usage_now.in_flight),
  },
  {
    name: "month",
    title: "Tokens this month",
    align: "right",
    extra: true,
    value: (key) => key.usage_now.tokens_this_month ?? null,
    cell: (key) => limitOf(key, LIMITS[4]),
  },
  { name: "used", title: "Last used", value: (key) => key.last_used_at, cell: (key) => age(key.last_used_at) },
  {
    name: "expires",
    title: "Expires",
    value: (key) => key.expires_at,
    cell: ({ expires_at: at }) => (at ? when(at) : "never"),
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
    const text = "Its next request is refused; what is under way goes on. The name can be given again.";
    if (!(await confirm({ title: `Revoke the key ${key.name}?`, text, action: "Revoke", danger: true }))) return;
    await api.del(pathOf(key.name));
    toast(`The key ${key.name} is revoked.`);
    close();
    await read();
  };
  const words = (/** @type {Api.Key} */ key) => [key.name, key.state, ...(key.models ?? [])];
  const has = (/** @type {Api.Key} */ key) =>
    words(key).some((word) => word.toLowerCase().includes(text.toLowerCase()));
  const make = html`<input type="search" aria-label="Find keys" placeholder="Find ( / )" value=${text}
      onInput=${(event) => setText(event.target.value)} />
    <${Button} tone="primary" icon="keys" onClick=${() => setOpen({ is: "create" })}>Create a key<//>`;
  return html`<${Page} title="Keys" actions=${make}
    lead="Each client has a key of its own, with its models and limits. The gateway knows a key only by its hash.">
    ${failure && html`<${Notice} tone="bad">${failure.message}<//>`}
    ${
      answer &&
      !answer.keys_needed &&
      html`<${Notice}>There are no keys: whoever reaches this port may use the
      models.<//>`
    }
    ${
      answer &&
      html`<${Card} flush><${Table} label="Keys" columns=${COLUMNS}
      rows=${answer.keys.filter(has)} sort="name"
      keyOf=${(/** @type {Api.Key} */ key) => key.name} onOpen=${(/** @type {Api.Key} */ key) =>
        setOpen({ is: "details", key })}
      empty=${
        text
          ? "No key is like that."
          : html`<${Empty} icon="keys" title="No keys">
        <p>With the first key, every client needs one.</p><//>`
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
