// The pages, in the order of the navigation.

import Machines from "./machines.js";
import Models from "./models.js";
import Overview from "./overview.js";
import Requests from "./requests.js";
import Workers from "./workers.js";

/**
 * name: the page's part of the address (`#/workers`); key: the letter that leads there after `g`; group: its heading in
 * the navigation. A page gets `params`: {name, rest: [what follows in the address], query: {…}}.
 */
export const PAGES = [
  { name: "overview", title: "Overview", key: "o", group: "Watch", page: Overview },
  { name: "workers", title: "Workers", key: "w", group: "Watch", page: Workers },
  { name: "models", title: "Models & names", key: "m", group: "Watch", page: Models },
  { name: "machines", title: "Machines & GPUs", key: "n", group: "Watch", page: Machines },
  { name: "requests", title: "Requests", key: "r", group: "Watch", page: Requests },
];
