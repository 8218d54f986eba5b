/** What a job's findings and notices say. */
import type { Finding, Job } from "../../api/types";
import { duration } from "../../format/format";

const NAMED = 5;

/** What makes it the same finding a moment later, though its text names another time: as `core.findings.Finding.key`. */
export function findingKey({ kind, cause, ranks, worker_id, host, device }: Finding): string {
  return JSON.stringify([kind, cause, ranks, worker_id, host, device]);
}

/** Whom a notice asks for what. All ranks stop, also where some members only are to leave. */
export function noticeSentence(notice: NonNullable<Job["notice"]>): string {
  const { action, reason, workers, grace_ms: grace, stopped, ranks } = notice;
  const what = workers.length > 0 ? `stop, and ${some(workers)} to leave` : "stop";
  return `All ranks are asked to ${what} (${action}): ${reason}. ${stopped} of ${ranks} have stopped; they have ${duration(grace)}.`;
}

export function some(names: readonly (string | number)[]): string {
  const more = names.length - NAMED;
  return `${names.slice(0, NAMED).join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}
