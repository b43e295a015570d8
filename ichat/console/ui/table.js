// Tables that are sorted by a click, and walked through by keys.

import { useState } from "preact/hooks";
import { t } from "../texts.js";
import { number } from "./format.js";
import { html } from "./html.js";

/** @import { ComponentChildren } from "preact" */

/** Rows that are drawn at most: more are named by their number, and found by a filter. */
const ROWS_MAX = 200;

/**
 * A column: `value` makes it sortable; `extra` columns are left out on narrow screens.
 *
 * @template Row
 * @typedef {{ name: string, title: string, cell: (row: Row) => ComponentChildren, value?: (row: Row) => unknown,
 *   align?: string, extra?: boolean }} Column
 */

/**
 * @param {unknown} left
 * @param {unknown} right
 */
const compare = (left, right) => {
  if (left === right) return 0;
  if (left === null || left === undefined) return 1;
  if (right === null || right === undefined) return -1;
  return typeof left === "number" && typeof right === "number"
    ? left - right
    : String(left).localeCompare(String(right), "en", { numeric: true });
};

/**
 * A table.
 *
 * `columns`: {name, title, cell(row), value(row)?, align?, extra?}. `value` makes a column sortable; `extra` columns
 * are left out on narrow screens. `keyOf(row)`: a row's id. `onOpen(row)`: what Enter and a click on a row do.
 * `sort`: the first order, as "name" or "-name". `empty`: what stands where there are no rows. At most ROWS_MAX rows
 * are drawn; `total`: how many there are where `rows` are not all; `hasFilter`: whether the page has a filter.
 *
 * @template Row
 * @param {{ columns: Column<Row>[], rows: Row[], keyOf: (row: Row) => string | number, onOpen?: (row: Row) => void,
 *   sort?: string, empty?: ComponentChildren, label: string, hrefOf?: (row: Row) => string, total?: number,
 *   hasFilter?: boolean }} props
 */
export function Table(props) {
  const { columns, rows, keyOf, onOpen, sort = "", empty = t("Nothing here."), label, hrefOf, total } = props;
  const { hasFilter = true } = props;
  const [order, setOrder] = useState(sort);
  const descends = order.startsWith("-");
  const by = /** @type {Required<Column<Row>> | undefined} */ (
    columns.find((column) => column.name === order.replace("-", "") && column.value)
  );
  const sorted = by ? [...rows].sort((a, b) => compare(by.value(a), by.value(b)) * (descends ? -1 : 1)) : rows;
  const drawn = sorted.slice(0, ROWS_MAX);
  const hidden = Math.max(total ?? 0, rows.length) - drawn.length;
  const turn = (/** @type {string} */ name) => setOrder(order === name ? `-${name}` : name);
  const isWalked = Boolean(onOpen || hrefOf);
  const [stop, setStop] = useState(/** @type {string | number | null} */ (null));
  const stopAt = Math.max(
    0,
    drawn.findIndex((row) => keyOf(row) === stop),
  );
  /**
   * Return the index of a row in the order of Tab: all rows are a single stop.
   *
   * @param {number} index
   */
  const tabindex = (index) => (isWalked ? (index === stopAt ? 0 : -1) : undefined);
  const move = (/** @type {KeyboardEvent & { target: HTMLElement }} */ event) => {
    const step = /** @type {Record<string, number>} */ ({ ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 })[event.key];
    const row = /** @type {HTMLTableRowElement | null} */ (event.target.closest("tbody tr"));
    if (!row || !event.target.matches("tr, .row-link")) return;
    if (step) {
      const next = step > 0 ? row.nextElementSibling : row.previousElementSibling;
      /** @type {HTMLElement | undefined} */ (next?.querySelector(".row-link") ?? next)?.focus();
      event.preventDefault();
    } else if (event.key === "Enter" && onOpen && event.target === row) {
      onOpen(drawn[row.sectionRowIndex]);
      event.preventDefault();
    }
  };
  const open = (/** @type {Event & { target: HTMLElement }} */ event, /** @type {Row} */ row) => {
    if (!onOpen || event.target.closest("a, button, input, label, select") || String(getSelection())) return;
    onOpen(row);
  };
  const name = (/** @type {Column<Row>} */ column) =>
    `${column.align === "right" ? "right" : ""} ${column.extra ? "extra" : ""}`;
  /**
   * @param {Column<Row>} column
   * @param {Row} row
   * @param {number} index
   * @param {number} at
   */
  const cell = (column, row, index, at) =>
    index === 0 && hrefOf
      ? html`<a class="row-link" href=${hrefOf(row)} tabindex=${tabindex(at)}>${column.cell(row)}</a>`
      : column.cell(row);
  return html`<div class="table-box"><table class=${onOpen ? "opens" : ""} aria-label=${label} onKeyDown=${move}>
    <thead><tr>${columns.map(
      (column) => html`<th key=${column.name} scope="col" class=${name(column)}
      aria-sort=${by === column ? (descends ? "descending" : "ascending") : undefined}>
      ${
        column.value
          ? html`<button type="button" onClick=${() => turn(column.name)}>${column.title}<i aria-hidden="true">
            ${by === column ? (descends ? "↓" : "↑") : ""}</i></button>`
          : column.title || html`<span class="unseen">${t("Actions")}</span>`
      }</th>`,
    )}</tr></thead>
    <tbody>${drawn.map(
      (row, at) => html`<tr key=${keyOf(row)} data-key=${keyOf(row)} tabindex=${hrefOf ? undefined : tabindex(at)}
      onFocusIn=${() => isWalked && setStop(keyOf(row))} onClick=${(event) => open(event, row)}>${columns.map(
        (column, index) => html`<td key=${column.name}
      class=${name(column)} data-title=${column.title}><div class="cell">
      ${cell(column, row, index, at)}</div></td>`,
      )}</tr>`,
    )}
    </tbody></table>
    ${!sorted.length && html`<div class="table-empty">${empty}</div>`}
    ${
      hidden > 0 &&
      html`<div class="table-empty" role="status">${
        hasFilter
          ? t("and {count} more: filter", { count: number(hidden) })
          : t("and {count} more", { count: number(hidden) })
      }</div>`
    }</div>`;
}
