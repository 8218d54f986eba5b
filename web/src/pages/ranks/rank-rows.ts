/** The columns of `Ranks`, turned into rows, with the device of each rank. */
import type { Device, Devices, Ranks } from "../../api/types";

export interface RankRow {
  readonly rank: number;
  readonly host: string;
  readonly workerId: string;
  readonly lost: boolean;
  readonly step: number | null;
  readonly behind: number;
  readonly phase: string;
  readonly heardMs: number | null;
  readonly heartbeatMs: number | null;
  readonly stalledMs: number;
  readonly computeUs: number | null;
  readonly relative: number | null;
  readonly own: number | null;
  readonly device: Device | null;
}

export function rankRows(ranks: Ranks, devices: Devices | undefined): RankRow[] {
  const byWorker = new Map<string, Device[]>();
  for (const device of devices?.devices ?? []) {
    const own = byWorker.get(device.worker_id);
    if (own) own.push(device);
    else byWorker.set(device.worker_id, [device]);
  }
  let furthest = -Infinity;
  for (const step of ranks.step) if (step !== null && step > furthest) furthest = step;
  return Array.from({ length: ranks.size }, (_, rank) => {
    const worker = ranks.workers[ranks.worker[rank] ?? -1];
    const step = ranks.step[rank] ?? null;
    const slot = worker?.first_rank === null || worker?.first_rank === undefined ? -1 : rank - worker.first_rank;
    return {
      rank,
      host: worker?.host ?? "",
      workerId: worker?.worker_id ?? "",
      lost: worker?.lost ?? false,
      step,
      behind: step === null ? 0 : furthest - step,
      phase: ranks.phases[ranks.phase[rank] ?? -1] ?? "",
      heardMs: ranks.heard_ms[rank] ?? null,
      heartbeatMs: worker?.heartbeat_age_ms ?? null,
      stalledMs: ranks.stalled_ms[rank] ?? 0,
      computeUs: ranks.compute_us[rank] ?? null,
      relative: ranks.relative_score[rank] ?? null,
      own: ranks.own_score[rank] ?? null,
      device: deviceOf(worker && byWorker.get(worker.worker_id), slot, worker?.slots ?? 0),
    };
  });
}

/** A member's ranks use its devices in their order; where there are fewer devices than slots, none is named. */
function deviceOf(devices: readonly Device[] | undefined, slot: number, slots: number): Device | null {
  if (devices === undefined || slot < 0 || devices.length < slots) return null;
  return devices.find((device) => device.index === slot) ?? null;
}

/** Return a sentence that says who holds the job up. */
export function blame(rows: readonly RankRow[]): string {
  const stuck = rows.filter((row) => row.stalledMs > 0);
  if (stuck.length > 0) return `${listed(stuck.map((row) => row.rank))} ${stuck.length === 1 ? "is" : "are"} stuck.`;
  const slow = rows.filter((row) => row.relative !== null && row.relative < 0.8);
  if (slow.length > 0 && slow.length < rows.length / 2) {
    slow.sort((a, b) => (a.relative ?? 1) - (b.relative ?? 1));
    return `${listed(slow.map((row) => row.rank))} ${slow.length === 1 ? "is" : "are"} slower than the others.`;
  }
  return "No rank holds the others up.";
}

function listed(ranks: readonly number[]): string {
  const some = ranks.slice(0, 5).join(", ");
  return `${ranks.length === 1 ? "Rank" : "Ranks"} ${some}${ranks.length > 5 ? ` and ${ranks.length - 5} more` : ""}`;
}
