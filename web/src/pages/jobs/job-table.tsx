import type { JobSummary } from "../../api/types";
import { count, duration, percent, significant } from "../../format/format";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { Table } from "../../ui/table";
import type { Column } from "../../ui/sorting";
import { PhaseState, ProgressBar, SinceStep, Trouble } from "./job-facts";

const COLUMNS: readonly Column<JobSummary>[] = [
  { id: "name", header: "Job", by: (job) => job.name, cell: (job) => <Link to={jobPath(job.name)} className="link font-medium">{job.name}</Link> },
  { id: "phase", header: "Phase", by: (job) => job.phase, cell: (job) => <PhaseState job={job} /> },
  { id: "ranks", header: "Ranks", align: "right", by: (job) => job.ranks, cell: (job) => (job.ranks ? count(job.ranks) : "–") },
  { id: "progress", header: "Step", by: (job) => job.progress?.step ?? null, cell: (job) => <ProgressBar job={job} /> },
  { id: "eta", header: "Left", title: "Time to the last step at the present rate", align: "right", by: (job) => job.progress?.eta_ms ?? null, cell: (job) => duration(job.progress?.eta_ms) },
  { id: "rate", header: "Steps/s", align: "right", by: (job) => job.progress?.steps_per_s ?? null, cell: (job) => significant(job.progress?.steps_per_s) },
  { id: "since", header: "Since a step", title: "Since the slowest rank completed a step", align: "right", by: (job) => job.progress?.since_step_ms ?? null, cell: (job) => <SinceStep job={job} /> },
  { id: "goodput", header: "Goodput", title: "Share of the wall time that went to steps that count", align: "right", by: (job) => job.goodput_ratio, cell: (job) => percent(job.goodput_ratio) },
  { id: "saved", header: "Saved", title: "Step of the latest committed checkpoint", align: "right", by: (job) => job.checkpoint_step, cell: (job) => count(job.checkpoint_step) },
  { id: "trouble", header: "What is wrong", wrap: true, cell: (job) => <Trouble job={job} /> },
];

export function JobTable({ jobs }: { jobs: readonly JobSummary[] }) {
  return <Table label="Jobs" columns={COLUMNS} rows={jobs} keyOf={(job) => job.name} />;
}
