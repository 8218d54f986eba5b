import type { JobSummary } from "../../api/types";
import { duration, percent, plural, significant } from "../../format/format";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { hasTrouble, PhaseState, ProgressBar, Trouble } from "./job-facts";

/** The jobs on a phone: a few lines each. */
export function JobCards({ jobs }: { jobs: readonly JobSummary[] }) {
  return (
    <ul className="grid divide-y divide-line border-y border-line">
      {jobs.map((job) => (
        <li key={job.name} className="grid gap-0.5 py-2">
          <div className="flex items-baseline justify-between gap-3">
            <Link to={jobPath(job.name)} className="link text-[14px] font-medium">{job.name}</Link>
            <PhaseState job={job} />
          </div>
          {job.progress && (
            <>
              <div><ProgressBar job={job} /></div>
              <p className="text-soft">
                {plural(job.ranks, "rank")} · {significant(job.progress.steps_per_s)} steps/s · {job.progress.eta_ms !== null && `${duration(job.progress.eta_ms)} left · `} goodput {percent(job.goodput_ratio)}
              </p>
            </>
          )}
          {hasTrouble(job) && <p><Trouble job={job} /></p>}
        </li>
      ))}
    </ul>
  );
}
