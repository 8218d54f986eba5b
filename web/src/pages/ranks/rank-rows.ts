/** The columns of `Ranks`, turned into rows, with the device of each rank. */
import type { Device, Devices, Finding, Ranks } from "../../api/types";
import { some } from "../job/sentences";

const NAMED = 3;

export interface RankRow {
  readonly rank: number;
  readonly host: string;
  readonly workerId: string;
  readonly lost: boolean;
  readonly done: boolean;
  readonly step: number | null;
  readonly behind: number;
  readonly phase: string;
  readonly lastSeenMs: number | null;
  readonly heartbeatMs: number | null;
  readonly stalledMs: number;
  readonly computeUs: number | null;
  readonly relative: number | null;
  readonly own: number | null;
  readonly device: Device | null;
  /** The findings that name the rank; `worst` is the index of the first of them among all, null without any. */
  readonly findings: readonly Finding[];
  readonly worst: number | null;
}

export function rankRows(ranks: Ranks, devices: Devices | undefined, findings: readonly Finding[]): RankRow[] {
  const naming = new Map<number, number[]>();
  findings.forEach((finding, at) => {
    for (const rank of finding.ranks) naming.set(rank, [...(naming.get(rank) ?? []), at]);
  });
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
    const own = naming.get(rank) ?? [];
    const slot = worker?.first_rank === null || worker?.first_rank === undefined ? -1 : rank - worker.first_rank;
    return {
      rank,
      host: worker?.host ?? "",
      workerId: worker?.worker_id ?? "",
      lost: worker?.lost ?? false,
      done: worker?.done ?? false,
      step,
      behind: step === null ? 0 : furthest - step,
      phase: ranks.phases[ranks.phase[rank] ?? -1] ?? "",
      lastSeenMs: ranks.last_seen_ms[rank] ?? null,
      heartbeatMs: worker?.heartbeat_age_ms ?? null,
      stalledMs: ranks.stalled_ms[rank] ?? 0,
      computeUs: ranks.compute_us[rank] ?? null,
      relative: ranks.relative_score[rank] ?? null,
      own: ranks.own_score[rank] ?? null,
      device: deviceOf(worker && byWorker.get(worker.worker_id), slot, worker?.slots ?? 0),
      findings: own.flatMap((at) => findings[at] ?? []),
      worst: own[0] ?? null,
    };
  });
}

/** A member's ranks use its devices in their order; with fewer devices than slots, none is named. */
function deviceOf(devices: readonly Device[] | undefined, slot: number, slots: number): Device | null {
  if (devices === undefined || slot < 0 || devices.length < slots) return null;
  return devices.find((device) => device.index === slot) ?? null;
}

/** Return the ranks that the findings name, with the kind of finding. Only the replicas decide that a rank is slow or stuck. */
export function named(findings: readonly Finding[]): string {
  const naming = findings.filter((each) => each.ranks.length > 0);
  if (naming.length === 0) return "No finding names a rank.";
  const shown = naming.slice(0, NAMED).map((each) => `${each.ranks.length === 1 ? "Rank" : "Ranks"} ${some(each.ranks)}: ${label(each)}`);
  const more = naming.length - NAMED;
  return shown.join(" · ") + (more > 0 ? ` · ${more} more` : "");
}

/** A finding in two words; its sentence is elsewhere on the page. */
export function label({ kind, cause }: Finding): string {
  return cause ? `${kind} (${cause})` : kind;
}

export function isSlow(findings: readonly Finding[]): boolean {
  return findings.some((each) => each.kind === "slow");
}
