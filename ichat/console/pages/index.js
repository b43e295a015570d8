// The pages, in the order of the navigation.

import Overview from "./overview.js";

/**
 * name: the page's part of the address (`#/workers`); key: the letter that leads there after `g`; group: its heading in
 * the navigation. A page gets `params`: {rest: [what follows in the address], query: {…}}.
 */
export const PAGES = [
  { name: "overview", title: "Overview", key: "o", group: "Watch", page: Overview },
];
