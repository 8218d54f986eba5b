import type { Generations, Job } from "../../api/types";
import { clock, compact, count, duration, percent, significant } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Meter } from "../../ui/meter";
import { Fact, Facts, Section } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import { JobCharts } from "./job-charts";
import { GenerationTimeline } from "./generation-timeline";
import { GoodputLedger } from "./goodput-ledger";

/** Whether the job makes progress, how much of its time is useful, and its interruptions. */
export default function OverviewPage({ job }: { job: string }) {
  const path = `/jobs/${encodeURIComponent(job)}`;
  const resource = useResource<Job>(path);
  const generations = useResource<Generations>(`${path}/generations`);
  return (
    <Loaded of={resource}>
      {(data) => (
        <div className="grid gap-6">
          <Progress job={data} />
          <JobCharts job={job} reported={data.reported} />
          <div className="grid gap-6 xl:grid-cols-[minmax(0,2fr)_minmax(0,3fr)]">
          <Section title="How much of the time is useful?" aside={data.goodput && `of ${duration(data.goodput.wall_s * 1000)} since the job began`}>
            {data.goodput ? <GoodputLedger goodput={data.goodput} /> : <Empty>Goodput is measured from the first step on.</Empty>}
          </Section>
          <Section title="What interrupted it?" aside="generations, and why each began">
            <Loaded of={generations}>{(all) => <GenerationTimeline generations={all.generations} />}</Loaded>
          </Section>
          </div>
        </div>
      )}
    </Loaded>
  );
}

function Progress({ job }: { job: Job }) {
  const { progress, goodput_ratio: goodput, checkpoint_step: saved, ranks } = job.summary;
  if (!progress) return <Empty>No rank has reported a step yet.</Empty>;
  const { step, step_high: high, target_step: target, since_step_ms: since } = progress;
  const done = step !== null && target ? step / target : null;
  const spread = step !== null && high !== null ? high - step : 0;
  return (
    <div className="grid gap-4">
      {done !== null && (
        <div className="flex items-center gap-3">
          <Meter ratio={done} label="Progress" className="h-2 w-full" />
          <span className="font-medium whitespace-nowrap">{percent(done)}</span>
        </div>
      )}
      <Facts>
        <Fact name="Step" note={target ? `of ${count(target)}` : spread > 0 ? `the fastest rank is ${spread} ahead` : undefined}>{count(step)}</Fact>
        <Fact name="Left" note={progress.eta_ms === null ? undefined : `until ${clock(Date.now() + progress.eta_ms)}`}>{duration(progress.eta_ms)}</Fact>
        <Fact name="Throughput" note={progress.samples_per_s === null ? undefined : `${progress.samples_per_s < 1e4 ? count(progress.samples_per_s) : compact(progress.samples_per_s)} samples/s`}>{significant(progress.steps_per_s)} steps/s</Fact>
        <Fact name="Since a step" tone={since !== null && since > 60_000 ? "text-bad" : ""} note="of the slowest rank">{duration(since)}</Fact>
        <Fact name="Goodput" note="of the wall time">{percent(goodput)}</Fact>
        <Fact name="Saved" note={job.restored_step === null ? "began from nothing" : `began from step ${count(job.restored_step)}`}>{saved === null ? "never" : `step ${count(saved)}`}</Fact>
        <Fact name="Epoch" note={progress.samples === null ? undefined : `${compact(progress.samples)} samples`}>{count(progress.epoch)}</Fact>
        <Fact name="Ranks" note={`${job.summary.min_workers} to ${job.summary.max_workers} members`}>{count(ranks)}</Fact>
      </Facts>
    </div>
  );
}
