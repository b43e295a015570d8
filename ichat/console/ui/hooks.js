// Hooks that several components share.

import { useCallback, useEffect, useReducer, useRef, useState } from "preact/hooks";

/** What `useKept` has kept, by its names, until the page is loaded anew. */
const kept = new Map();

/**
 * Return a function that draws the component again.
 *
 * @returns {() => void}
 */
export function useRedraw() {
  const [, draw] = useReducer((value, /** @type {void} */ _) => value + 1, 0);
  return draw;
}

/** Draw the component again every second, since it shows a growing duration. */
export function useTick() {
  const draw = useRedraw();
  useEffect(() => {
    const timer = setInterval(draw, 1000);
    return () => clearInterval(timer);
  }, []);
}

/** Return a ref whose `current` is whether the component is still shown. */
export function useMounted() {
  const isMounted = useRef(true);
  useEffect(
    () => () => {
      isMounted.current = false;
    },
    [],
  );
  return isMounted;
}

/**
 * State that is still there when the component is shown again: return [value, set(change), forget()].
 *
 * `change` is a function of the value before. `first` makes the first value from the kept value, or from undefined.
 *
 * @template Value
 * @param {string} name
 * @param {(kept: Value | undefined) => Value} first
 * @returns {[Value, (change: (before: Value) => Value) => void, () => void]}
 */
export function useKept(name, first) {
  const [value, draw] = useState(() => first(kept.get(name)));
  const set = useCallback(
    (/** @type {(before: Value) => Value} */ change) =>
      draw((before) => {
        const after = change(before);
        kept.set(name, after);
        return after;
      }),
    [name],
  );
  const forget = useCallback(() => void kept.delete(name), [name]);
  return [value, set, forget];
}
