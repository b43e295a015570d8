// The console's components, in a single module to import from.

export { render } from "preact";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export * from "./ui/api_words.js";
export * from "./ui/basics.js";
export * from "./ui/chart.js";
export * from "./ui/format.js";
export * from "./ui/hooks.js";
export { html } from "./ui/html.js";
export * from "./ui/icons.js";
export * from "./ui/overlays.js";
export * from "./ui/table.js";
