import { age, count, duration, NONE } from "../../format/format";
import type { Column } from "../../ui/sorting";
import { VirtualTable } from "../../ui/virtual-table";
import { State, worstTone } from "../../ui/tone";
import { isSlow, label, type RankRow } from "./rank-rows";
import { Score } from "./score";

const GB = 1e9;

const COLUMNS: readonly Column<RankRow>[] = [
  { id: "rank", header: "Rank", width: "3rem", by: (row) => row.rank, cell: (row) => <span className="font-medium">{row.rank}</span> },
  { id: "finding", header: "Finding", title: "Findings that name it; their sentences stand above", width: "minmax(8rem,1.2fr)", by: (row) => row.worst, cell: (row) => <Named row={row} /> },
  { id: "host", header: "Host", width: "minmax(5.5rem,1.2fr)", by: (row) => row.host, cell: (row) => <span className={row.lost ? "text-bad" : row.done ? "text-soft" : ""}>{row.host || (row.done ? row.workerId : NONE)}{row.lost ? " (lost)" : row.done && " (done)"}</span> },
  { id: "relative", header: "To fastest", title: "Compute time of the fastest rank over that of this one: 1 is as fast", width: "5.75rem", align: "right", by: (row) => row.relative, cell: (row) => <Score value={row.relative} slow={isSlow(row.findings)} /> },
  { id: "own", header: "To own best", title: "Its own best compute time over the present one: 1 is as fast as ever", width: "6rem", align: "right", by: (row) => row.own, cell: (row) => <Score value={row.own} slow={isSlow(row.findings)} /> },
  { id: "compute", header: "Compute", title: "Compute time of the last step, without waiting for others", width: "4.25rem", align: "right", by: (row) => row.computeUs, cell: (row) => (row.computeUs === null ? NONE : duration(row.computeUs / 1000)) },
  { id: "stalled", header: "Stuck for", width: "4.5rem", align: "right", by: (row) => row.stalledMs || null, cell: (row) => (row.stalledMs > 0 ? <span className="font-medium text-bad">{age(row.stalledMs)}</span> : NONE) },
  { id: "phase", header: "Phase", width: "minmax(4.25rem,0.6fr)", by: (row) => row.phase, cell: (row) => row.phase || NONE },
  { id: "step", header: "Step", width: "5.75rem", align: "right", by: (row) => row.step, cell: (row) => <>{row.behind > 0 && <span className="mr-1.5 text-soft">−{row.behind}</span>}{count(row.step)}</> },
  { id: "heartbeat", header: "Heartbeat", title: "Age of the last heartbeat of its member", width: "4.5rem", align: "right", by: (row) => row.heartbeatMs, cell: (row) => <span className={row.heartbeatMs !== null && row.heartbeatMs > 5000 ? "text-bad" : ""}>{age(row.heartbeatMs)}</span> },
  { id: "seen", header: "Report", title: "Since the rank reported something", width: "3.75rem", align: "right", by: (row) => row.lastSeenMs, cell: (row) => age(row.lastSeenMs) },
  { id: "util", header: "GPU", width: "3rem", align: "right", by: (row) => row.device?.utilization_percent ?? null, cell: (row) => unit(row.device?.utilization_percent, " %") },
  { id: "memory", header: "Memory", width: "5rem", align: "right", by: (row) => row.device?.memory_used_bytes ?? null, cell: (row) => memory(row) },
  { id: "heat", header: "Heat", width: "3.5rem", align: "right", by: (row) => row.device?.temperature_c ?? null, cell: (row) => <span className={(row.device?.temperature_c ?? 0) >= 85 ? "text-warn" : ""}>{unit(row.device?.temperature_c, " °C")}</span> },
  { id: "power", header: "Power", width: "3.5rem", align: "right", by: (row) => row.device?.power_mw ?? null, cell: (row) => (row.device?.power_mw == null ? NONE : `${Math.round(row.device.power_mw / 1000)} W`) },
  { id: "fault", header: "Device fault", width: "minmax(5rem,1.2fr)", by: (row) => fault(row) || null, cell: (row) => <span className="text-bad">{fault(row)}</span> },
];

const SORT = [{ id: "finding", desc: false }, { id: "relative", desc: false }];
const ROWS_PX = 27;

export function RankTable({ rows, open, onRank }: { rows: readonly RankRow[]; open: string | null; onRank: (rank: number) => void }) {
  const height = `min(70vh, ${rows.length * ROWS_PX + 44}px)`;
  return (
    <VirtualTable label="Ranks, those that a finding names first, then the slowest" columns={COLUMNS} rows={rows} keyOf={(row) => String(row.rank)}
      sort={SORT} height={height} least="87rem" current={open} onOpen={(row) => onRank(row.rank)} />
  );
}

function Named({ row: { findings } }: { row: RankRow }) {
  const tone = worstTone(findings);
  if (tone === null) return NONE;
  return <span title={findings.map((each) => each.text).join("\n")}><State tone={tone}>{findings.map(label).join(", ")}</State></span>;
}

function unit(value: number | null | undefined, suffix: string): string {
  return value === null || value === undefined ? NONE : `${value}${suffix}`;
}

function memory({ device }: RankRow): string {
  if (device?.memory_used_bytes == null) return NONE;
  const used = Math.round(device.memory_used_bytes / GB);
  return device.memory_total_bytes === null ? `${used} GB` : `${used}/${Math.round(device.memory_total_bytes / GB)} GB`;
}

function fault({ device }: RankRow): string {
  if (device === null) return "";
  return device.fault || (device.xids.length > 0 ? `Xid ${device.xids.join(", ")}` : device.ecc_uncorrected ? `${device.ecc_uncorrected} ECC errors` : "");
}
