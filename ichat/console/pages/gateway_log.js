// The gateway's own lines.

import { t } from "../texts.js";
import { Card, html, Page } from "../ui.js";
import { Log } from "./log.js";

/** @import { Route } from "../router.js" */

/**
 * The page.
 *
 * @param {{ params: Route }} props
 */
export default function GatewayLog({ params }) {
  return html`<${Page} title=${t("Gateway log")} lead=${t(
    "The lines of the gateway itself; each worker has a log of its own.",
  )}>
    <${Card}><${Log} id="" place=${["log"]} query=${params.query} /><//><//>`;
}
