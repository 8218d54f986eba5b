import type { ReactNode } from "react";
import type { Job } from "../../api/types";
import { plural } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { PageTitle } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { State, toneOfPhase, worstTone, type Tone } from "../../ui/tone";
import { Findings } from "./findings";

const TABS = [["", "Overview"], ["ranks", "Ranks"], ["barriers", "Barriers"], ["data", "Data"], ["checkpoints", "Checkpoints"], ["events", "Events"]] as const;

/** The head of all pages of a job: its name, its phase, its findings, and links to the other pages. */
export function JobShell({ job, page, children }: { job: string; page: string; children: ReactNode }) {
  const resource = useResource<Job>(`/jobs/${encodeURIComponent(job)}`);
  return (
    <div className="grid gap-4">
      <div className="grid gap-2">
        <PageTitle title={job}>
          {resource.data && <PhaseLine job={resource.data} />}
        </PageTitle>
        {resource.data && <Findings job={resource.data} />}
      </div>
      <Loaded of={resource}>
        {(data) => (
          <>
            <nav aria-label={`Pages of ${job}`} className="flex gap-x-5 overflow-x-auto border-b border-line">
              {TABS.map(([to, name]) => (
                <Link key={to} to={jobPath(job, to)} aria-current={page === to ? "page" : undefined}
                  className="-mb-px border-b-2 border-transparent pb-1.5 whitespace-nowrap text-soft outline-offset-[-2px] hover:text-ink aria-[current]:border-accent aria-[current]:font-medium aria-[current]:text-ink">
                  {name}
                  {to === "barriers" && data.summary.open_barriers > 0 && <span className="ml-1 rounded-full bg-sunken px-1.5 text-[11px] text-ink">{data.summary.open_barriers} open</span>}
                </Link>
              ))}
            </nav>
            {children}
          </>
        )}
      </Loaded>
    </div>
  );
}

function PhaseLine({ job: { summary, findings } }: { job: Job }) {
  return (
    <span className="flex flex-wrap items-baseline gap-x-3 text-soft">
      <span className="text-ink"><State tone={toneOf(summary.phase, findings)}>{summary.phase}</State></span>
      {summary.generation > 0 && <span>generation {summary.generation}</span>}
      {summary.members > 0 && <span>{plural(summary.ranks, "rank")}, {plural(summary.members, "member")}{summary.standbys > 0 && ` (${summary.standbys} standby)`}</span>}
      {summary.reason && <span>{summary.reason}</span>}
    </span>
  );
}

function toneOf(phase: string, findings: Job["findings"]): Tone {
  return worstTone(findings) ?? toneOfPhase(phase);
}
