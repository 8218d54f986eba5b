/** One job's line in the list; the table and the cards of a phone share it. */
import type { JobSummary } from "../../api/types";
import { count, duration, NONE, plural } from "../../format/format";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { Meter } from "../../ui/meter";
import { State, toneOfPhase } from "../../ui/tone";

const STUCK_MS = 60_000;

function stuck(job: JobSummary): boolean {
  return job.phase === "running" && (job.progress?.since_step_ms ?? 0) > STUCK_MS;
}

export function PhaseState({ job }: { job: JobSummary }) {
  return <State tone={stuck(job) ? "bad" : job.finding ? "warn" : toneOfPhase(job.phase)}>{job.phase}</State>;
}

export function ProgressBar({ job }: { job: JobSummary }) {
  const { step = null, target_step: target = null } = job.progress ?? {};
  if (step === null) return <>{NONE}</>;
  return (
    <span className="inline-flex items-center gap-2">
      {target !== null && <Meter ratio={step / target} label={`Progress of ${job.name}`} />}
      <span>{count(step)}{target !== null && <span className="text-soft"> / {count(target)}</span>}</span>
    </span>
  );
}

export function SinceStep({ job }: { job: JobSummary }) {
  const since = job.progress?.since_step_ms;
  return <span className={stuck(job) ? "text-bad" : ""}>{duration(since)}</span>;
}

export function hasTrouble(job: JobSummary): boolean {
  return Boolean(job.unreadable || job.open_barriers || job.finding || job.reason);
}

/** The findings, and links to their pages. */
export function Trouble({ job }: { job: JobSummary }) {
  const to = jobPath(job.name, "barriers");
  if (job.unreadable) return <span className="text-bad">{job.unreadable}</span>;
  return (
    <>
      {job.open_barriers > 0 && <Link to={to} className="link in-text mr-2 whitespace-nowrap">{plural(job.open_barriers, "open barrier")}</Link>}
      {job.finding ? <span className={stuck(job) ? "text-bad" : "text-warn"}>{job.finding}</span> : <span className="text-soft">{job.reason}</span>}
    </>
  );
}
