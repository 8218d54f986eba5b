import { useState } from "react";
import type { Barriers, Job, OpenBarrier } from "../../api/types";
import { age } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { Note, toneOfFinding } from "../../ui/tone";
import { findingKey, noticeSentence } from "./sentences";

const LONG_OPEN_MS = 10_000;
const FEW = 3;

/** The job's findings, in the sentences that commands, metrics and logs show too. */
export function Findings({ job }: { job: Job }) {
  const { summary, notice, findings } = job;
  const [all, setAll] = useState(false);
  const shown = all ? findings : findings.slice(0, FEW);
  return (
    <div className="grid gap-1.5">
      {summary.unreadable && <Note tone="bad">{summary.unreadable}</Note>}
      {job.failed_in_a_row > 0 && (
        <Note tone="warn">{job.failed_in_a_row} of at most {job.max_failed_in_a_row} generations in a row ended in a failure before they saved</Note>
      )}
      {notice && (
        <Note tone="warn">{noticeSentence(notice)}</Note>
      )}
      {summary.open_barriers > 0 && <StuckBarriers job={summary.name} />}
      {shown.map((finding) => (
        <Note key={findingKey(finding)} tone={toneOfFinding(finding.kind)}>
          {finding.text}
          {finding.since_ms != null && finding.kind !== "stalled" && <span className="text-soft"> · for {age(finding.since_ms)}</span>}
          {finding.ranks[0] !== undefined && <Link to={`${jobPath(summary.name, "ranks")}?rank=${finding.ranks[0]}`} className="link in-text ml-2 whitespace-nowrap">Look at rank {finding.ranks[0]}</Link>}
        </Note>
      ))}
      {findings.length > FEW && <button type="button" className="link justify-self-start" onClick={() => setAll(!all)}>{all ? "Fewer" : `${findings.length - FEW} more`}</button>}
    </div>
  );
}

function StuckBarriers({ job }: { job: string }) {
  const { data } = useResource<Barriers>(`/jobs/${encodeURIComponent(job)}/barriers`);
  return data?.open.filter((each) => each.age_ms > LONG_OPEN_MS).map((each) => (
    <Note key={`${each.name} ${each.generation} ${each.round}`} tone="bad">
      {barrierSentence(each)}
      <Link to={jobPath(job, "barriers")} className="link in-text ml-2 whitespace-nowrap">Look at barriers</Link>
    </Note>
  ));
}

export function barrierSentence(barrier: OpenBarrier): string {
  const who = barrier.missing_total === 1 ? `rank ${barrier.missing_ranks}` : `ranks ${barrier.missing_ranks}`;
  return `Barrier ${barrier.name}, round ${barrier.round}, has waited ${age(barrier.age_ms)} for ${who}: ${barrier.arrived} of ${barrier.expected} have arrived`;
}
