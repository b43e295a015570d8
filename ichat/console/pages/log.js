// A log: its lines as they arrive, older lines, a search of all kept lines, and a file. Each view has an address.

import { partsOf } from "../ansi.js";
import { send } from "../api.js";
import { hrefOf, readRoute, replace } from "../router.js";
import { t } from "../texts.js";
import {
  Button,
  count,
  html,
  inWords,
  number,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
  when,
} from "../ui.js";
import { useLines } from "./log/live.js";
import { KEPT_MAX, useOlder, usePart } from "./log/pages.js";

/** @import { Line } from "./log/live.js" */

const DRAWN_MAX = 1500;
const NEAR_PX = 40;
const TYPED_MS = 300;

/** @typedef {{ id: string, place: string[], query: Record<string, string> }} LogProps */

/**
 * The log of a worker, or of the gateway for an empty id.
 *
 * `place` is the page of the address, and what follows; `query` has the view: `find`, `run` and `at`.
 *
 * @param {LogProps} props
 */
export function Log({ id, place, query }) {
  return query.at && id
    ? html`<${Around} id=${id} place=${place} query=${query} />`
    : html`<${Newest} id=${id} place=${place} query=${query} />`;
}

/**
 * Return the query of an address with these changes; an empty value leaves the parameter out.
 *
 * @param {Record<string, string>} query
 * @param {Record<string, string>} changes
 */
function changed(query, changes) {
  return Object.fromEntries(Object.entries({ ...query, ...changes }).filter(([, value]) => value));
}

/** @param {LogProps} props */
function Newest({ id, place: [page, ...rest], query }) {
  const previous = query.run === "previous";
  const find = query.find ?? "";
  const [text, setText] = useState(find);
  const [isPaused, setPaused] = useState(false);
  const path = id ? `/v1/logs/stream/${encodeURIComponent(id)}` : "/v1/logs/gateway";
  const [lines, status] = useLines(path, previous, isPaused);
  const asked = useMemo(() => changed({}, { text: find, previous: previous ? "1" : "" }), [find, previous]);
  const [older, readOlder] = useOlder(id, lines, asked);
  const look = (/** @type {Record<string, string>} */ changes) =>
    replace(page, rest, changed(readRoute().query, changes));
  const sent = useRef(find);
  useEffect(() => {
    if (find === sent.current) return; // else the address was changed elsewhere
    sent.current = find;
    setText(find);
  }, [find]);
  useEffect(() => {
    const timer = setTimeout(() => {
      if (text === sent.current) return;
      sent.current = text;
      look({ find: text });
    }, TYPED_MS);
    return () => clearTimeout(timer);
  }, [text]);
  const hasLines = lines.length > 0 || status === "ended";
  const isNew = older.before === "" && !older.isBusy && !older.error;
  useEffect(() => {
    if (id && find && hasLines && isNew) readOlder();
  }, [id, find, hasLines, isNew]);
  const found = useMemo(() => {
    const wanted = find.toLowerCase();
    const live = wanted ? lines.filter((one) => plainOf(one).includes(wanted)) : lines;
    return live.slice(-DRAWN_MAX);
  }, [lines, find]);
  const hasMore = id !== "" && older.before !== null;
  const isHoled = older.lines.length > 0 && (lines.length > found.length || older.joins !== lines[0]?.key) && !find;
  const top = olderWords({ hasMore, older, find, isOwn: id === "" });
  const said = find
    ? t("{count} found", { count: number(found.length + older.lines.length) })
    : count(lines.length, "{count} line", "{count} lines");
  return html`<div class="log">
    <div class="log-bar">
      <input type="search" aria-label=${t("Find lines")} placeholder=${t("Find ( / )")} value=${text} maxlength="200"
        onInput=${(event) => setText(event.target.value)} />
      <${Button} small icon=${isPaused ? "play" : "pause"} onClick=${() => setPaused(!isPaused)}
        aria-pressed=${isPaused}>${isPaused ? t("Go on") : t("Pause")}<//>
      ${
        id &&
        html`<label class="check"><input type="checkbox" checked=${previous}
        onChange=${(event) => look({ run: event.target.checked ? "previous" : "" })} /> ${t("Previous run")}</label>
      <${Button} small onClick=${() => download(id, previous)}>${t("Download")}<//>`
      }
      <span class="spring"></span>
      <span class="muted num" role="status">${isPaused ? t("paused") : inWords(status)} · ${said}</span>
    </div>
    <${Box} lines=${[...older.lines, ...(isHoled ? [HOLE] : []), ...found]} sticks=${true}
      hrefAt=${(/** @type {string} */ at) => hrefOf(page, rest, changed(query, { at, find: "", run: "" }))}
      onTop=${hasMore && !find && older.lines.length > 0 && !older.isBusy ? readOlder : null}
      top=${html`${top && html`<span>${top}</span>`}${
        hasMore && older.lines.length < KEPT_MAX && (lines.length > 0 || find)
          ? html` <${Button} small onClick=${readOlder} disabled=${older.isBusy}>${t("Older lines")}<//>`
          : ""
      }`}
      empty=${find ? t("No line has that.") : t("Nothing was written yet.")} /></div>`;
}

/** @type {Line} */
const HOLE = { key: "hole", line: t("… newer lines follow after these …"), tone: "gap", time: "" };

/**
 * Return what stands above the lines.
 *
 * @param {{ hasMore: boolean, older: import("./log/pages.js").Older, find: string, isOwn: boolean }} facts
 */
function olderWords({ hasMore, older, find, isOwn }) {
  if (older.error) return older.error;
  if (older.isBusy) return find ? t("Searching older lines…") : t("Reading older lines…");
  if (isOwn) return t("The lines since the gateway's start, as far as they are kept in memory.");
  if (!hasMore) return find ? t("All kept lines were searched.") : t("These are the oldest lines that are kept.");
  if (older.lines.length >= KEPT_MAX)
    return t("Older lines are at the address of the first line's time, and in the file.");
  return find && older.before ? t("Further lines were not searched yet.") : "";
}

/** @param {LogProps} props */
function Around({ id, place: [page, ...rest], query }) {
  const at = query.at ?? "";
  const [part, more] = usePart(id, at);
  const live = hrefOf(page, rest, changed(query, { at: "" }));
  const button = (/** @type {"before" | "after"} */ way, /** @type {string} */ title) =>
    html`<${Button} small onClick=${() => more(way)} disabled=${part.isBusy}>${title}<//>`;
  const canRead = part.lines.length < KEPT_MAX;
  const top = part.before === null ? t("These are the oldest lines that are kept.") : "";
  const older = part.before !== null && canRead ? button("before", t("Older lines")) : "";
  return html`<div class="log">
    <div class="log-bar">
      <a class="button small" href=${live}>${t("Newest lines")}</a>
      <${Button} small onClick=${() => download(id, part.lines.at(-1)?.previous ?? false)}>${t("Download")}<//>
      <span class="spring"></span>
      <span class="muted num" role="status">${
        part.isBusy ? t("reading…") : count(part.lines.length, "{count} line", "{count} lines")
      }</span>
    </div>
    <${Box} lines=${part.lines} marked=${at} sticks=${false}
      hrefAt=${(/** @type {string} */ one) => hrefOf(page, rest, changed(query, { at: one }))}
      top=${html`<span>${part.error || top}</span>${older}`}
      bottom=${canRead && !part.error ? button("after", t("Newer lines")) : ""}
      empty=${part.isBusy ? t("Reading…") : t("No line is kept here.")} /></div>`;
}

/**
 * Lines in a box that scrolls.
 *
 * @param {{ lines: Line[], sticks: boolean, marked?: string, hrefAt: (at: string) => string,
 *   onTop?: (() => void) | null, top: unknown, bottom?: unknown, empty: string }} props
 */
function Box({ lines, sticks, marked, hrefAt, onTop, top, bottom, empty }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const isAtEnd = useRef(sticks);
  const seen = useRef({ first: "", below: 0, marked: "" });
  useLayoutEffect(() => {
    const box = place.current;
    if (!box) return;
    const first = lines[0]?.key ?? "";
    const mark = marked && seen.current.marked !== marked && box.querySelector(".marked");
    if (mark) {
      mark.scrollIntoView({ block: "center" });
      seen.current.marked = marked;
    } else if (isAtEnd.current) box.scrollTop = box.scrollHeight;
    else if (seen.current.first && first !== seen.current.first) box.scrollTop = box.scrollHeight - seen.current.below;
    Object.assign(seen.current, { first, below: box.scrollHeight - box.scrollTop });
  }, [lines, marked]);
  const scrolled = (/** @type {{ currentTarget: HTMLElement }} */ { currentTarget: box }) => {
    isAtEnd.current = sticks && box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
    seen.current.below = box.scrollHeight - box.scrollTop;
    if (box.scrollTop < NEAR_PX && box.scrollHeight > box.clientHeight) onTop?.();
  };
  return html`<div class="lines live" ref=${place} onScroll=${scrolled} tabindex="0" role="log" aria-label=${t("Log")}
      aria-live="off">
      <div class="gap edge">${top}</div>
      ${lines.map((one) => html`<${Row} key=${one.key} line=${one} hrefAt=${hrefAt} isMarked=${one.key === marked} />`)}
      ${!lines.length && html`<div class="gap">${empty}</div>`}
      ${bottom && html`<div class="gap edge">${bottom}</div>`}
    </div>`;
}

/**
 * A line with its time, which leads to the lines around it where they are kept in files. A time that the line has
 * itself is not added.
 *
 * @param {{ line: Line, hrefAt: (at: string) => string, isMarked: boolean }} props
 */
function Row({ line: { line, tone, time, position, previous }, hrefAt, isMarked }) {
  const clock = time ? when(Date.parse(time) / 1000).slice(-8) : "";
  const look = [tone, previous && "of-previous", isMarked && "marked"].filter(Boolean).join(" ");
  const parts = partsOf(line || " ").map((part) => ({ ...part, isTime: false }));
  const at = clock ? parts.findIndex((part) => part.text.includes(clock)) : -1;
  if (at >= 0) {
    const [begin] = parts[at].text.split(clock, 1);
    const cut = [begin, clock, parts[at].text.slice(begin.length + clock.length)];
    parts.splice(at, 1, ...cut.map((text, index) => ({ ...parts[at], text, isTime: index === 1 })));
  } else if (clock) parts.unshift({ text: clock, look: "added", isTime: true });
  return html`<div class=${look} title=${previous ? t("{time}, previous run", { time }) : time}>${parts.map(
    ({ text, look: own, isTime }) => {
      if (isTime && position) return html`<a class=${`at ${own}`} href=${hrefAt(position)}>${text}</a>`;
      if (own) return html`<span class=${own}>${text}</span>`;
      return text;
    },
  )}</div>`;
}

/** @param {Line} line */
function plainOf({ line }) {
  return partsOf(line)
    .map((part) => part.text)
    .join("")
    .toLowerCase();
}

/**
 * Have the browser keep the lines of a run as a file.
 *
 * @param {string} id
 * @param {boolean} previous
 */
async function download(id, previous) {
  const response = await send(`/v1/logs/files/${encodeURIComponent(id)}${previous ? "?previous=1" : ""}`);
  const address = URL.createObjectURL(await response.blob());
  const link = Object.assign(document.createElement("a"), { href: address, download: `${id}.log` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
