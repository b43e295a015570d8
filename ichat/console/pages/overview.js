// Overview: what runs, what is wrong, and the last hour.

import { useStore } from "../store.js";
import { Card, Empty, Page, StateBadge, Table, html } from "../ui.js";
import { go, hrefOf } from "../router.js";

/** The page that the console opens with. */
export default function Overview() {
  const workers = useStore((all) => all.workers);
  const columns = [
    { name: "id", title: "Worker", value: (row) => row.worker_id, cell: (row) => row.worker_id },
    { name: "state", title: "State", value: (row) => row.state, cell: ({ state }) => html`<${StateBadge} state=${state} />` },
  ];
  return html`<${Page} title="Overview">
    <${Card} title="Workers" flush><${Table} label="Workers" columns=${columns} rows=${workers}
      keyOf=${(row) => row.worker_id} hrefOf=${(row) => hrefOf("workers", [row.worker_id])}
      onOpen=${(row) => go("workers", [row.worker_id])}
      empty=${html`<${Empty} title="No workers" />`} /><//><//>`;
}
