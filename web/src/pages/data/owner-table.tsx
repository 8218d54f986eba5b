import { useState } from "react";
import type { Dataset } from "../../api/types";
import { count } from "../../format/format";
import { Meter } from "../../ui/meter";

const FEW = 12;

/** Shards by member, the most first. */
export function OwnerTable({ dataset, high }: { dataset: Dataset; high: number }) {
  const [all, setAll] = useState(false);
  const owners = Object.entries(dataset.owned).sort(([a, m], [b, n]) => n - m || a.localeCompare(b));
  const shown = all ? owners : owners.slice(0, FEW);
  return (
    <>
      <ul className="grid gap-x-8 gap-y-0.5 sm:grid-cols-2 xl:grid-cols-3">
        {shown.map(([worker, shards]) => (
          <li key={worker} className="grid grid-cols-[minmax(0,10rem)_minmax(2rem,1fr)_2.5rem] items-center gap-x-3">
            <span className="truncate" title={worker}>{worker}</span>
            <Meter ratio={shards / Math.max(1, high)} label={`Shards of ${worker}`} tone="bg-control" className="w-full" />
            <span className="text-right">{count(shards)}</span>
          </li>
        ))}
      </ul>
      {owners.length > FEW && <button type="button" className="link mt-1" onClick={() => setAll(!all)}>{all ? "Fewer" : `All ${owners.length} members`}</button>}
    </>
  );
}
