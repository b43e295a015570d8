// The pages, in the order of the navigation.

import { t } from "../texts.js";
import Configuration from "./config.js";
import GatewayLog from "./gateway_log.js";
import Keys from "./keys.js";
import Launch from "./launch.js";
import Machines from "./machines.js";
import Models from "./models.js";
import Orders from "./orders.js";
import Overview from "./overview.js";
import Playground from "./playground.js";
import Requests from "./requests.js";
import Usage from "./usage.js";
import Workers from "./workers.js";

/** @import { ComponentChildren } from "preact" */
/** @import { Route } from "../router.js" */

/**
 * name: the page's part of the address (`#/workers`); key: the letter that leads there after `g`; group: its heading in
 * the navigation. A page gets `params`: {name, rest: [what follows in the address], query: {…}}.
 *
 * @type {{ name: string, title: string, key: string, group: string, icon?: string,
 *   page: (props: { params: Route }) => ComponentChildren }[]}
 */
export const PAGES = [
  { name: "overview", title: t("Overview"), key: "o", group: t("Watch"), page: Overview },
  { name: "workers", title: t("Workers"), key: "w", group: t("Watch"), page: Workers },
  { name: "models", title: t("Models & names"), key: "m", group: t("Watch"), page: Models },
  { name: "machines", title: t("Machines & GPUs"), key: "n", group: t("Watch"), page: Machines },
  { name: "requests", title: t("Requests"), key: "r", group: t("Watch"), page: Requests },
  { name: "log", title: t("Gateway log"), key: "e", group: t("Watch"), page: GatewayLog },
  { name: "playground", title: t("Playground"), key: "p", group: t("Use"), page: Playground },
  { name: "launch", title: t("Launch"), key: "l", group: t("Operate"), page: Launch },
  { name: "orders", title: t("Orders"), key: "t", group: t("Operate"), page: Orders },
  { name: "config", title: t("Configuration"), key: "c", group: t("Operate"), page: Configuration },
  { name: "keys", title: t("Keys"), key: "k", group: t("Operate"), page: Keys },
  { name: "usage", title: t("Usage"), key: "u", group: t("Operate"), page: Usage },
];
