/** The texts of a job's findings and notices. */
import type { Finding, Job } from "../../api/types";
import { duration } from "../../format/format";

const NAMED = 5;

/** The identity of a finding, although its text changes with time: as `core.findings.Finding.key`. */
export function findingKey({ kind, cause, ranks, worker_id, host, device }: Finding): string {
  return JSON.stringify([kind, cause, ranks, worker_id, host, device]);
}

/** The members and the request of a notice. All ranks stop, even if only some members leave. */
export function noticeSentence(notice: NonNullable<Job["notice"]>): string {
  const { action, reason, workers, grace_ms: grace, stopped, ranks } = notice;
  const what = workers.length > 0 ? `stop, and ${some(workers)} to leave` : "stop";
  return `All ranks are requested to ${what} (${action}): ${reason}. ${stopped} of ${ranks} have stopped; they have ${duration(grace)}.`;
}

export function some(names: readonly (string | number)[]): string {
  const more = names.length - NAMED;
  return `${names.slice(0, NAMED).join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}
