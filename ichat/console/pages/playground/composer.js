// The field for the next message: a text, and pictures that are chosen, pasted or dropped.

import { t } from "../../texts.js";
import { Button, html, Icon, toast, useRef, useState } from "../../ui.js";

/** @import { Chat } from "./chat.js" */

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const PICTURES_MAX = 8;
const PICTURE_BYTES_MAX = 16 * 1024 * 1024;
const LINES_MAX = 12;
const BUSY_HINT = t("Escape stops the answer; then Enter sends again.");

/**
 * @param {File} file
 * @returns {Promise<string>}
 */
function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(/** @type {string} */ (reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/**
 * Return the pictures among these files as data URLs; other files are reported.
 *
 * @param {File[]} files
 * @param {number} room
 */
async function picturesIn(files, room) {
  /** @type {string[]} */
  const found = [];
  for (const file of files) {
    if (!KINDS.includes(file.type))
      toast(t("{name} is no picture that models read (PNG, JPEG, WebP, GIF).", { name: file.name }), "bad");
    else if (file.size > PICTURE_BYTES_MAX) toast(t("{name} is larger than 16 MiB.", { name: file.name }), "bad");
    else if (found.length >= room)
      toast(t("More than {count} pictures are not sent at once.", { count: PICTURES_MAX }), "bad");
    else found.push(await read(file));
  }
  return found;
}

/**
 * Pictures as small images, each with a button that removes it (`onRemove`).
 *
 * @param {{ pictures?: string[], onRemove?: (at: number) => void }} props
 */
export function Pictures({ pictures, onRemove }) {
  if (!pictures?.length) return null;
  return html`<div class="pictures">${pictures.map(
    (url, at) => html`<span key=${at} class="picture">
    <img src=${url} alt=${t("Picture {count}", { count: at + 1 })} />
    ${
      onRemove &&
      html`<button type="button" class="icon-button" aria-label=${t("Take picture {count} away", { count: at + 1 })}
      onClick=${() => onRemove(at)}><${Icon} name="close" size=${14} /></button>`
    }</span>`,
  )}</div>`;
}

/**
 * The field. `draft`: {text, pictures}; `onSend` is called by Enter, `onStop` by Escape.
 *
 * @param {{ draft: Chat["draft"], onChange: (draft: Chat["draft"]) => void, onSend: () => void,
 *   onStop: () => void, isBusy: boolean, why: string }} props
 */
export function Composer({ draft, onChange, onSend, onStop, isBusy, why }) {
  const [isOver, setOver] = useState(false);
  const chooser = useRef(/** @type {HTMLInputElement | null} */ (null));
  const latest = useRef(draft);
  latest.current = draft;
  const add = async (/** @type {File[]} */ files) => {
    const pictures = await picturesIn(files, PICTURES_MAX - latest.current.pictures.length);
    if (pictures.length) onChange({ ...latest.current, pictures: [...latest.current.pictures, ...pictures] });
  };
  const isEmpty = !draft.text.trim() && !draft.pictures.length;
  const send = () => {
    if (!isEmpty && !why && !isBusy) onSend();
  };
  const press = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && isBusy) onStop();
  };
  const paste = (/** @type {ClipboardEvent} */ event) => {
    const files = [.../** @type {DataTransfer} */ (event.clipboardData).files];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
  const drop = (/** @type {DragEvent} */ event) => {
    event.preventDefault();
    setOver(false);
    add([.../** @type {DataTransfer} */ (event.dataTransfer).files]);
  };
  const over = (/** @type {DragEvent} */ event) => {
    event.preventDefault();
    setOver(true);
  };
  const rows = Math.min(LINES_MAX, Math.max(2, draft.text.split("\n").length));
  return html`<div class="composer-place"><div class=${`composer ${isOver ? "over" : ""}`}
      onDragOver=${over} onDragLeave=${() => setOver(false)} onDrop=${drop}>
    <${Pictures} pictures=${draft.pictures}
      onRemove=${(/** @type {number} */ gone) =>
        onChange({ ...draft, pictures: draft.pictures.filter((_, at) => at !== gone) })} />
    <textarea rows=${rows} aria-label=${t("Message")} placeholder=${t("Write a message")} value=${draft.text}
      onKeyDown=${press}
      onPaste=${paste} onInput=${(event) => onChange({ ...draft, text: event.target.value })}></textarea>
    <div class="composer-bar">
      <input ref=${chooser} type="file" class="only-read" tabindex="-1" aria-label=${t("Pictures")} multiple
        accept=${KINDS.join(",")} onChange=${(event) => {
          add([.../** @type {FileList} */ (event.target.files)]);
          event.target.value = "";
        }} />
      <${Button} small tone="quiet" onClick=${() => chooser.current?.click()}>${t("Add pictures")}<//>
      <span class="hint spring">${why || (isBusy ? BUSY_HINT : t("Enter sends, Shift+Enter begins a new line."))}</span>
      ${
        isBusy
          ? html`<${Button} icon="close" onClick=${onStop}>${t("Stop")}<//>`
          : html`<${Button} tone="primary" disabled=${isEmpty || Boolean(why)} onClick=${send}>${t("Send")}<//>`
      }
    </div></div></div>`;
}
