import { useMemo } from "react";
import type { Action, Checkpoint } from "../../api/types";
import { bytes, clock, count, plural } from "../../format/format";
import type { Column } from "../../ui/sorting";
import { Table } from "../../ui/table";
import { State, toneOfCheckpoint } from "../../ui/tone";
import type { Asked } from "./checkpoints-page";

const COLUMNS: readonly Column<Checkpoint>[] = [
  {
    id: "step", header: "Step", by: (each) => each.step,
    cell: (each) => (
      <span className="inline-flex items-baseline gap-1.5">
        <span className="font-medium">{count(each.step)}</span>
        {each.latest && <Mark>latest</Mark>}
        {each.pinned && <Mark>pinned</Mark>}
        {each.tags.map((tag) => <Mark key={tag}>{tag}</Mark>)}
      </span>
    ),
  },
  { id: "created", header: "Created", by: (each) => each.created_unix_ms, cell: (each) => clock(each.created_unix_ms) },
  { id: "state", header: "State", by: (each) => each.state, cell: (each) => <CheckpointState checkpoint={each} /> },
  { id: "type", header: "Type", by: (each) => each.type, cell: (each) => <>{each.type}{each.base_step !== null && <span className="text-soft"> on {count(each.base_step)}</span>}{each.origin_job && <span className="text-soft"> of {each.origin_job}</span>}</> },
  { id: "size", header: "Size", align: "right", by: (each) => each.size_bytes, cell: (each) => bytes(each.size_bytes) },
  { id: "references", header: "Used by", title: "Other checkpoints and jobs that use its bytes, which are stored once: while there are any, it cannot be deleted", align: "right", by: (each) => each.references, cell: (each) => <>{count(each.references)}{each.readers > 0 && <span className="text-soft">, {plural(each.readers, "reader")}</span>}</> },
  { id: "copies", header: "Copies", fill: true, cell: (each) => <Copies checkpoint={each} /> },
];

export function CheckpointTable({ checkpoints, mayOperate, onAsk }: {
  checkpoints: readonly Checkpoint[]; mayOperate: boolean; onAsk: (asked: Asked) => void;
}) {
  const columns = useMemo(
    () => (mayOperate ? [...COLUMNS, { id: "actions", header: "", cell: (each: Checkpoint) => <Buttons checkpoint={each} onAsk={onAsk} /> }] : COLUMNS),
    [mayOperate, onAsk],
  );
  return <Table label="Checkpoints" columns={columns} rows={checkpoints} keyOf={(each) => `${each.step} ${each.attempt}`} />;
}

function Mark({ children }: { children: React.ReactNode }) {
  return <span className="rounded-[3px] bg-sunken px-1 text-[11px] text-ink">{children}</span>;
}

function CheckpointState({ checkpoint }: { checkpoint: Checkpoint }) {
  const { state, acked, ranks, missing_ranks: missing, reason } = checkpoint;
  return (
    <span title={reason}>
      <State tone={toneOfCheckpoint(state)}>{state}</State>
      {acked < ranks && <span className="ml-2 text-soft">{acked} of {ranks} ranks{missing && `, waits for ${missing}`}</span>}
    </span>
  );
}

function Copies({ checkpoint }: { checkpoint: Checkpoint }) {
  return (
    <span className="inline-flex gap-x-3">
      {checkpoint.copies.map((copy) => (
        <span key={copy.tier} title={copy.path}>
          {copy.tier} <span className={copy.state === "corrupt" ? "font-medium text-bad" : "text-soft"}>{copy.state}{copy.shared && ", shared"}</span>
          {checkpoint.suspected.includes(copy.tier) && <span className="ml-1 font-medium text-bad">damaged</span>}
        </span>
      ))}
    </span>
  );
}

function Buttons({ checkpoint, onAsk }: { checkpoint: Checkpoint; onAsk: (asked: Asked) => void }) {
  const step = count(checkpoint.step);
  const one = (action: Action, name: string, tag = "") => (
    <button key={name} type="button" className="link" aria-label={`${name} checkpoint of step ${step}`} onClick={() => onAsk({ action, checkpoint, tag })}>{name}</button>
  );
  if (checkpoint.state !== "committed") return null;
  return (
    <span className="flex justify-end gap-x-3">
      {checkpoint.pinned ? one("unpin", "Unpin") : one("pin", "Pin")}
      {one("tag", "Tag")}
      {checkpoint.tags.map((tag) => one("untag", `Untag ${tag}`, tag))}
      {one("fork", "Fork")}
      {one("delete", "Delete")}
    </span>
  );
}
