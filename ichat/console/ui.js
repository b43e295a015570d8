// The console's components, all in one place to import from.

import { h, render, Fragment, createContext } from "preact";
import {
  useCallback, useContext, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "preact/hooks";
import { html } from "./ui/html.js";

export { h, render, Fragment, createContext, html };
export { useCallback, useContext, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState };
export * from "./ui/format.js";
export * from "./ui/basics.js";
export * from "./ui/overlays.js";
export * from "./ui/table.js";
export * from "./ui/chart.js";
export * from "./ui/icons.js";
