// What would keep a worker from starting, asked while the form is filled in.

import { api } from "../../api.js";
import { useEffect, useState } from "../../ui.js";

/**
 * The gateway's findings about a worker; `isOld`: the form has changed since.
 *
 * @typedef {Partial<Api.LaunchCheck> & { objections: string[], isOld?: boolean }} Check
 */

const PAUSE_MS = 600;

/**
 * The gateway's findings about the worker before its launch: requested again after a pause in typing.
 *
 * @param {(Api.Launch & Record<string, unknown>) | null} body
 */
export function useCheck(body, round = 0) {
  const [answer, setAnswer] = useState(/** @type {Check | null} */ (null));
  const text = JSON.stringify(body);
  useEffect(() => {
    setAnswer((before) => before && { ...before, isOld: true });
    if (!body?.model_path) {
      setAnswer(null);
      return undefined;
    }
    const control = new AbortController();
    const timer = setTimeout(async () => {
      try {
        setAnswer(await api.post("/v1/admin/workers/launch?dry_run=1", body, { signal: control.signal }));
      } catch (error) {
        if (error.name !== "AbortError") setAnswer({ objections: [error.message] });
      }
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [text, round]);
  return answer;
}
