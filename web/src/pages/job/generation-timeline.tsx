import type { Generation } from "../../api/types";
import { clock, count, duration, NONE } from "../../format/format";
import { Empty } from "../../ui/states";
import type { Column } from "../../ui/sorting";
import { Table } from "../../ui/table";
import { State } from "../../ui/tone";

interface Lasting extends Generation {
  readonly endedUnixMs: number | null;
}

const COLUMNS: readonly Column<Lasting>[] = [
  { id: "generation", header: "Generation", cell: (each) => <span className="font-medium">{each.generation}</span> },
  { id: "began", header: "Began", cell: (each) => clock(each.began_unix_ms) },
  { id: "lasted", header: "Lasted", align: "right", cell: (each) => (each.endedUnixMs === null ? "until now" : duration(each.endedUnixMs - each.began_unix_ms)) },
  { id: "ranks", header: "Ranks", align: "right", cell: (each) => count(each.ranks) },
  { id: "from", header: "From step", align: "right", cell: (each) => (each.restored_step === null ? "nothing" : count(each.restored_step)) },
  { id: "to", header: "Saved", align: "right", cell: (each) => (each.committed_step === null ? NONE : count(each.committed_step)) },
  { id: "reason", header: "Why it began", wrap: true, cell: (each) => <>{each.failure && <span className="mr-2"><State tone="bad">failure</State></span>}{each.reason}</> },
];

/** The generations on one line of time, and as a table. */
export function GenerationTimeline({ generations }: { generations: readonly Generation[] }) {
  if (generations.length === 0) return <Empty>No generation has begun: the job waits for its members.</Empty>;
  const rows = generations.map((each, i): Lasting => ({ ...each, endedUnixMs: generations[i - 1]?.began_unix_ms ?? null }));
  const begin = rows.at(-1)?.began_unix_ms ?? 0;
  const end = Date.now();
  const share = (ms: number) => `${Math.max(0, ((ms - begin) / Math.max(1, end - begin)) * 100)}%`;
  return (
    <div className="grid gap-2">
      <div aria-hidden="true">
        <div className="relative h-6 overflow-hidden rounded-[4px] bg-sunken">
          {rows.map((each) => (
            <div key={each.generation} title={each.reason} className={`absolute inset-y-0 overflow-hidden border-l-2 bg-raised px-1.5 text-[11px] leading-6 outline outline-line ${each.failure ? "border-bad" : "border-good"}`}
              style={{ left: share(each.began_unix_ms), right: `calc(100% - ${share(each.endedUnixMs ?? end)})` }}>
              {each.generation}
            </div>
          ))}
        </div>
        <div className="mt-0.5 flex justify-between text-[11px] text-soft"><span>{clock(begin)}</span><span>now</span></div>
      </div>
      <Table label="Generations" columns={COLUMNS} rows={rows} keyOf={(each) => String(each.generation)} fixed />
    </div>
  );
}
