// The picture on the Overview: requests on their way from keys to GPUs, as they are now.

import { go } from "../../router.js";
import { t } from "../../texts.js";
import {
  Button,
  Card,
  colorOf,
  html,
  number,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "../../ui.js";
import { cut } from "./faces.js";
import { graphOf, kindsFor, wordsOf } from "./graph.js";
import { lanesAt } from "./lanes.js";
import { layoutOf, neighbourOf, wayOf } from "./layout.js";
import { paintDots, paintLines, streamsOf } from "./paint.js";
import { PictureTable, rowsOf } from "./table.js";

/** @import { State } from "../../store.js" */
/** @import { Layout, PlacedNode } from "./layout.js" */
/** @import { Colors, Stream } from "./paint.js" */

/** How fast a canvas is drawn at most, in points for each pixel. */
const DENSITY_MAX = 2;

/** Return the colours of lines in the theme that is on. */
function useColors() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const change = () => setTheme((value) => value + 1);
    addEventListener("ichat-theme", change);
    return () => removeEventListener("ichat-theme", change);
  }, []);
  return useMemo(
    () => ({
      lines: ["chart-1", "chart-2", "chart-3", "chart-4", "chart-5"].map(colorOf),
      idle: colorOf("line-strong"),
      queue: colorOf("warn"),
    }),
    [theme],
  );
}

/**
 * Return the width of an element, in pixels.
 *
 * @param {{ current: HTMLElement | null }} place
 */
function useWidth(place) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const box = place.current;
    if (!box) return undefined;
    setWidth(Math.floor(box.clientWidth));
    const observer = new ResizeObserver(() => setWidth(Math.floor(box.clientWidth)));
    observer.observe(box);
    return () => observer.disconnect();
  }, []);
  return width;
}

/**
 * Return a canvas's context for drawing in pixels, and give the canvas its size.
 *
 * @param {HTMLCanvasElement | null} canvas
 * @param {Pick<Layout, "width" | "height">} size
 */
function contextOf(canvas, { width, height }) {
  const density = Math.min(DENSITY_MAX, devicePixelRatio || 1);
  const context = canvas?.getContext("2d") ?? null;
  if (!canvas || !context) return null;
  const [points, rows] = [Math.round(width * density), Math.round(height * density)];
  if (canvas.width !== points || canvas.height !== rows) Object.assign(canvas, { width: points, height: rows });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  context.setTransform(density, 0, 0, density, 0, 0);
  return context;
}

/**
 * The lines between nodes, and the dots that run along them; nothing runs that is out of sight.
 *
 * @param {{ layout: Layout, chosen: string | null }} props
 */
function Lines({ layout, chosen }) {
  const below = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const above = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const colors = useColors();
  const streams = useMemo(() => streamsOf(layout.lines), [layout]);
  const latest = useRef(
    /** @type {{ layout: Layout, streams: Stream[], colors: Colors }} */ ({ layout, streams, colors }),
  );
  latest.current = { layout, streams, colors };
  const isAlive = streams.length > 0;
  useLayoutEffect(() => {
    const context = contextOf(below.current, layout);
    if (context) paintLines(context, layout, colors, chosen);
    contextOf(above.current, layout);
  }, [layout, colors, chosen]);
  useEffect(() => {
    if (!isAlive || !above.current) return undefined;
    const canvas = above.current;
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let frame = 0;
    const draw = (/** @type {number} */ at) => {
      const now = latest.current;
      const context = canvas.getContext("2d");
      if (context) paintDots(context, now.layout, now.streams, now.colors, at / 1000);
      frame = requestAnimationFrame(draw);
    };
    const observer = new IntersectionObserver(([entry]) => {
      cancelAnimationFrame(frame);
      if (entry.isIntersecting && !isStill) frame = requestAnimationFrame(draw);
    });
    observer.observe(canvas);
    return () => {
      observer.disconnect();
      cancelAnimationFrame(frame);
      canvas.getContext("2d")?.clearRect(0, 0, canvas.width, canvas.height);
    };
  }, [isAlive]);
  return html`<canvas ref=${below} aria-hidden="true"></canvas><canvas ref=${above} aria-hidden="true"></canvas>`;
}

/**
 * A node: its title, its activity, and the members of a group.
 *
 * @param {{ node: PlacedNode, isStop: boolean, isPale: boolean, choose: (id: string | null) => void }} props
 */
function NodeView({ node, isStop, isPale, choose }) {
  const { id, kind, title, note, tone, cells, load, x, y, width, height } = node;
  const place = { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` };
  const isGroup = cells.length > 0;
  const hasTone = !isGroup && kind !== "key" && kind !== "name";
  return html`<li style=${place} class=${`node ${tone} ${isPale ? "pale" : ""}`}>
    <a href=${node.href} data-node=${id} tabindex=${isStop ? 0 : -1} aria-label=${wordsOf(node)} title=${cut(title)}
      onFocus=${() => choose(id)} onBlur=${() => choose(null)} onMouseEnter=${() => choose(id)}
      onMouseLeave=${() => choose(null)}>
      ${load !== null && html`<i class="node-load" style=${{ width: `${Math.round(load * 100)}%` }}></i>`}
      <b>${hasTone && html`<i class=${`dot ${tone}`}></i>`}<bdi>${title}</bdi></b>${" "}
      <span><bdi>${note}</bdi></span>
      ${isGroup && html`<span class="cells">${cells.map((cell, at) => html`<i key=${at} class=${cell}></i>`)}</span>`}
    </a></li>`;
}

/**
 * The nodes in their columns. Arrow keys lead from node to node, and Enter to a node's page.
 *
 * @param {{ layout: Layout }} props
 */
function Nodes({ layout }) {
  const [chosen, choose] = useState(/** @type {string | null} */ (null));
  const [stop, setStop] = useState("");
  const way = chosen !== null && layout.nodes.some((node) => node.id === chosen) ? wayOf(layout.lines, chosen) : null;
  const first = layout.nodes.find((node) => node.id === stop) ?? layout.nodes[0];
  const pick = (/** @type {string | null} */ id) => {
    choose(id);
    if (id !== null) setStop(id);
  };
  const move = (/** @type {KeyboardEvent & { currentTarget: HTMLElement, target: HTMLElement }} */ event) => {
    if (!event.key.startsWith("Arrow") || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = neighbourOf(layout, event.target.dataset.node ?? "", event.key);
    const links = /** @type {NodeListOf<HTMLElement>} */ (event.currentTarget.querySelectorAll("[data-node]"));
    for (const link of links) if (next && link.dataset.node === next.id) link.focus();
    event.preventDefault();
  };
  return html`<${Lines} layout=${layout} chosen=${way ? chosen : null} />
    <div class="columns" role="group" aria-label=${t("Requests on their way")} onKeyDown=${move}>${layout.columns.map(
      (column) =>
        html`<ul key=${column.title} aria-label=${column.title}>${column.nodes.map(
          (node) => html`<${NodeView} key=${node.id} node=${node} isStop=${node === first}
        isPale=${Boolean(way) && !way?.has(node.id)} choose=${pick} />`,
        )}</ul>`,
    )}</div>`;
}

/**
 * The card with the picture, or with the table of the same.
 *
 * @param {{ state: State, isTable: boolean }} props
 */
export function Picture({ state, isTable }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const shown = useRef(/** @type {Set<string>} */ (new Set()));
  const width = useWidth(place);
  const { workers, models, machines, aliases, lanes: rates } = state;
  const now = Date.now();
  const lanes = lanesAt(rates, now);
  const layout = useMemo(() => {
    const graph = graphOf({ workers, models, machines, aliases }, lanes, kindsFor(width), shown.current);
    shown.current = new Set(graph.columns.flatMap((column) => column.nodes.map((node) => node.id)));
    return layoutOf(graph, width);
  }, [workers, models, machines, aliases, width, rates, Math.round(now / 1000)]);
  const drawn = useMemo(() => html`<${Nodes} layout=${layout} />`, [layout]); // other events leave it as it is
  const turn = () => go("overview", [], isTable ? {} : { view: "table" });
  const actions = html`<${Button} small tone="quiet" onClick=${turn}>${
    isTable ? t("As a picture") : t("As a table")
  }<//>`;
  const lead = isTable
    ? ""
    : t("A line is as thick as its tokens a second: the height of a node stands for {top}.", {
        top: number(layout.top),
      });
  return html`<${Card} title=${t("Requests on their way")} lead=${lead} actions=${actions} flush=${isTable}>
    ${isTable && html`<${PictureTable} rows=${rowsOf({ workers, models, machines }, lanes)} />`}
    <div class="picture-box" hidden=${isTable}>
      <div class="heads" aria-hidden="true">${layout.columns.map(
        ({ title, x, width: own }) =>
          html`<span key=${title} style=${{ left: `${x}px`, width: `${own}px` }}>${title}</span>`,
      )}</div>
      <div ref=${place} class="picture-live" style=${{ height: `${layout.height}px` }}>
        ${!isTable && width > 0 && drawn}</div>
      ${
        rates.leftOut > 0 &&
        html`<p class="hint">${t("{count} requests by further ways are not drawn.", {
          count: number(rates.leftOut),
        })}</p>`
      }
    </div><//>`;
}
