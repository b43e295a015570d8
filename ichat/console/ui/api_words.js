// The words of the API, as people read them.

import { t } from "../texts.js";

/** @type {Record<string, string>} */
const WORDS = {
  // States of workers and of relays.
  starting: t("starting"),
  loading: t("loading"),
  pending: t("pending"),
  ready: t("ready"),
  cold: t("cold"),
  stopped: t("stopped"),
  asleep: t("asleep"),
  waking: t("waking"),
  following: t("member"),
  draining: t("draining"),
  ending: t("ending"),
  unhealthy: t("unhealthy"),
  wedged: t("stuck"),
  stale: t("unknown"),
  restarting: t("restarting"),
  failed: t("failed"),
  broken: t("broken"),
  gone: t("gone"),
  accepting: t("accepting"),
  retiring: t("retiring"),
  // States of circuits, keys and logs.
  open: t("open"),
  "half-open": t("half-open"),
  active: t("active"),
  expired: t("expired"),
  connecting: t("connecting"),
  live: t("live"),
  ended: t("ended"),
  // Steps of a reload.
  start: t("start"),
  stop: t("stop"),
  restart: t("restart"),
  update: t("update"),
  set: t("set"),
  keep: t("keep"),
  later: t("later"),
  add: t("add"),
  remove: t("remove"),
  // Phases of requests.
  begun: t("begun"),
  queued: t("queued"),
  waiting: t("waiting"),
  first_token: t("first_token"),
  streaming: t("streaming"),
  plain: t("plain"),
  // Phases of loads.
  downloading: t("downloading"),
  checking: t("checking"),
  "waiting for room": t("waiting for room"),
  "starting the process": t("starting the process"),
  "reading the configuration": t("reading the configuration"),
  "starting its processes": t("starting its processes"),
  "loading weights": t("loading weights"),
  profiling: t("profiling"),
  compiling: t("compiling"),
  "sizing the KV cache": t("sizing the KV cache"),
  "capturing graphs": t("capturing graphs"),
  "warming up": t("warming up"),
  "waking up": t("waking up"),
};

/**
 * Return a word of the API as people read it; a word that is not known stays as it is.
 *
 * @param {string} word
 */
export const inWords = (word) => (Object.hasOwn(WORDS, word) ? WORDS[word] : word);
