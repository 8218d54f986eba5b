import type { Checkpoint } from "../../api/types";
import { bytes, clock, count } from "../../format/format";

const HEIGHT = 56;

/** When checkpoints were made, and how large they are. The table below says the same in words. */
export function CheckpointTimeline({ checkpoints }: { checkpoints: readonly Checkpoint[] }) {
  const begin = Math.min(...checkpoints.map((each) => each.created_unix_ms));
  const end = Math.max(...checkpoints.map((each) => each.created_unix_ms));
  const largest = Math.max(1, ...checkpoints.map((each) => each.size_bytes));
  const left = (ms: number) => `calc((100% - 6px) * ${end === begin ? 0.5 : (ms - begin) / (end - begin)})`;
  return (
    <div role="img" aria-label={`${checkpoints.length} checkpoints from ${clock(begin)} to ${clock(end)}, the largest has ${bytes(largest)}`}>
      <div className="relative border-b border-control" style={{ height: HEIGHT }}>
        {checkpoints.map((each) => (
          <span key={`${each.step} ${each.attempt}`} title={`step ${count(each.step)}, ${each.type}, ${bytes(each.size_bytes)}`}
            className={`absolute bottom-0 w-1.5 rounded-t-[2px] ${each.suspected.length > 0 || each.state === "corrupt" ? "bg-bad" : each.state !== "committed" ? "bg-warn" : each.pinned || each.tags.length > 0 ? "bg-accent" : "bg-control"} ${each.type === "full" ? "" : "opacity-70"}`}
            style={{ left: left(each.created_unix_ms), height: Math.max(6, (HEIGHT * each.size_bytes) / largest) }} />
        ))}
      </div>
      <div aria-hidden="true" className="mt-0.5 flex flex-wrap justify-between gap-x-4 text-[11px] text-soft">
        <span>{clock(begin)}</span>
        <span>{clock(end)}</span>
        <span className="flex w-full flex-wrap justify-center gap-x-3"><Key tone="bg-control">kept by rule</Key><Key tone="bg-accent">pinned or tagged</Key><Key tone="bg-warn">not committed</Key><Key tone="bg-bad">damaged</Key></span>
      </div>
    </div>
  );
}

function Key({ tone, children }: { tone: string; children: string }) {
  return <span className="inline-flex items-center gap-1"><span className={`inline-block size-2 rounded-[2px] ${tone}`} />{children}</span>;
}
