import type { Barriers, OpenBarrier } from "../../api/types";
import { age, count } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { Meter } from "../../ui/meter";
import { PageTitle, Section } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import type { Column } from "../../ui/sorting";
import { Table } from "../../ui/table";
import { State, type Tone } from "../../ui/tone";
import { LatencyHistogram } from "./latency-histogram";

type Missing = OpenBarrier["missing"][number];
type Ended = Barriers["ended"][number];

const RESULT: Readonly<Record<string, Tone>> = { released: "good", timed_out: "bad", broken: "bad" };

const ENDED: readonly Column<Ended>[] = [
  { id: "name", header: "Barrier", by: (each) => each.name, cell: (each) => <span className="font-medium">{each.name}</span> },
  { id: "generation", header: "Generation", align: "right", by: (each) => each.generation, cell: (each) => each.generation },
  { id: "round", header: "Round", align: "right", by: (each) => each.round, cell: (each) => count(each.round) },
  { id: "result", header: "Outcome", by: (each) => each.result, cell: (each) => <State tone={RESULT[each.result] ?? "idle"}>{each.result.replace("_", " ")}</State> },
  { id: "reason", header: "Why", wrap: true, cell: (each) => each.reason },
];

/** The missing ranks. */
export default function BarriersPage({ job }: { job: string }) {
  const resource = useResource<Barriers>(`/jobs/${encodeURIComponent(job)}/barriers`);
  return (
    <div className="grid gap-6">
      <PageTitle title={`Barriers of ${job}`} hidden />
      <Loaded of={resource}>
        {(data) => (
          <>
            <Section title="Who is missing?">
              {data.open.length === 0 ? <Empty>No barrier is open: no rank waits.</Empty> : (
                <div className="grid gap-4">{data.open.map((each) => <Open key={`${each.name} ${each.generation} ${each.round}`} job={job} barrier={each} />)}</div>
              )}
            </Section>
            <Section title="How long do barriers take?" aside="from the first arrival to the outcome, of the rounds at this replica">
              <LatencyHistogram buckets={data.latency} />
            </Section>
            <Section title="Ended rounds">
              {data.ended.length === 0 ? <Empty>No round has ended yet.</Empty> : <Table label="Ended rounds" columns={ENDED} rows={data.ended} keyOf={(each) => `${each.name} ${each.generation} ${each.round}`} />}
            </Section>
          </>
        )}
      </Loaded>
    </div>
  );
}

function Open({ job, barrier }: { job: string; barrier: OpenBarrier }) {
  const who = barrier.missing_total === 1 ? `Rank ${barrier.missing_ranks} is missing` : `Ranks ${barrier.missing_ranks} are missing`;
  const columns: readonly Column<Missing>[] = [
    { id: "rank", header: "Missing rank", cell: (each) => <Link className="link font-medium" to={`${jobPath(job, "ranks")}?rank=${each.rank}`}>{each.rank}</Link> },
    { id: "host", header: "Host", cell: (each) => each.host },
    { id: "worker", header: "Member", cell: (each) => each.worker_id },
    { id: "step", header: "Step", align: "right", cell: (each) => count(each.step) },
    { id: "phase", header: "Phase", cell: (each) => each.phase },
    { id: "seen", header: "Last report", align: "right", cell: (each) => (each.last_seen_ms === null ? "–" : `${age(each.last_seen_ms)} ago`) },
  ];
  return (
    <article className="grid gap-2 rounded-md border border-line px-3 py-2.5">
      <div className="flex flex-wrap items-baseline gap-x-4 gap-y-0.5">
        <h3 className="text-[15px] font-semibold">{barrier.missing_total === 0 ? "All have arrived" : who}</h3>
        <span>barrier <span className="font-medium">{barrier.name}</span>, generation {barrier.generation}, round {count(barrier.round)}</span>
        <span className={barrier.age_ms > 60_000 ? "text-bad" : "text-soft"}>open for {age(barrier.age_ms)}</span>
      </div>
      <div className="flex items-center gap-3 text-soft">
        <Meter ratio={barrier.arrived / Math.max(1, barrier.expected)} label="Arrived" className="w-40" />
        {count(barrier.arrived)} of {count(barrier.expected)} have arrived
      </div>
      {barrier.missing.length > 0 && <Table label={`Missing at ${barrier.name}`} columns={columns} rows={barrier.missing} keyOf={(each) => String(each.rank)} fixed />}
      {barrier.missing_total > barrier.missing.length && <p className="text-soft">The first {barrier.missing.length} of {count(barrier.missing_total)}.</p>}
    </article>
  );
}
