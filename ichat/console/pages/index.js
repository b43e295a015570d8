// The pages, in the order of the navigation.

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
  { name: "overview", title: "Overview", key: "o", group: "Watch", page: Overview },
  { name: "workers", title: "Workers", key: "w", group: "Watch", page: Workers },
  { name: "models", title: "Models & names", key: "m", group: "Watch", page: Models },
  { name: "machines", title: "Machines & GPUs", key: "n", group: "Watch", page: Machines },
  { name: "requests", title: "Requests", key: "r", group: "Watch", page: Requests },
  { name: "log", title: "Gateway log", key: "e", group: "Watch", page: GatewayLog },
  { name: "playground", title: "Playground", key: "p", group: "Use", page: Playground },
  { name: "launch", title: "Launch", key: "l", group: "Operate", page: Launch },
  { name: "orders", title: "Orders", key: "t", group: "Operate", page: Orders },
  { name: "config", title: "Configuration", key: "c", group: "Operate", page: Configuration },
  { name: "keys", title: "Keys", key: "k", group: "Operate", page: Keys },
  { name: "usage", title: "Usage", key: "u", group: "Operate", page: Usage },
];
