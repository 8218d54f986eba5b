import { lazy, Suspense, useCallback, useMemo } from "react";
import type { Devices, Finding, Heatmap, Job, Ranks } from "../../api/types";
import { plural } from "../../format/format";
import { parts } from "../../parts";
import { useResource } from "../../live/hooks";
import { setQuery, useRoute } from "../../route/route";
import { PageTitle, Section } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import { RankDrawer } from "./rank-drawer";
import { named, rankRows } from "./rank-rows";
import { RankTable } from "./rank-table";
import { Standbys } from "./standbys";

const HeatmapChart = lazy(parts.heatmap);

const NONE_FOUND: readonly Finding[] = [];

/** The ranks and their times, under the sentences of the findings that name ranks. */
export default function RanksPage({ job }: { job: string }) {
  const path = `/jobs/${encodeURIComponent(job)}`;
  const { query } = useRoute();
  const open = query.get("rank");
  const heatmap = useResource<Heatmap>(`${path}/heatmap`);
  const ranks = useResource<Ranks>(`${path}/ranks`);
  const findings = useResource<Job>(path).data?.findings ?? NONE_FOUND;
  const devices = useResource<Devices>(`${path}/devices`);
  const onRank = useCallback((rank: number) => setQuery("rank", String(rank)), []);
  const onClose = useCallback(() => setQuery("rank", null), []);
  return (
    <div className="grid gap-5">
      <PageTitle title={`Ranks of ${job}`} hidden />
      <Section title="Compute time by rank and time" aside={heatmap.data ? `of the last step of each ${heatmap.data.interval_ms / 1000} s, without waiting for others` : "without waiting for others"}>
        <Loaded of={heatmap}>
          {(map) =>
            map.ranks === 0 || map.columns.length === 0 ? <Empty>The ranks have not reported compute times yet.</Empty> : (
              <Suspense fallback={<div className="h-28" />}><HeatmapChart map={map} onRank={onRank} /></Suspense>
            )
          }
        </Loaded>
      </Section>
      <Loaded of={ranks}>{(data) => <Content ranks={data} devices={devices.data} findings={findings} open={open} onRank={onRank} />}</Loaded>
      {open !== null && /^\d+$/.test(open) && <RankDrawer key={open} job={job} findings={findings} rank={Number(open)} onClose={onClose} />}
    </div>
  );
}

function Content({ ranks, devices, findings, open, onRank }: {
  ranks: Ranks; devices: Devices | undefined; findings: readonly Finding[]; open: string | null; onRank: (rank: number) => void;
}) {
  const rows = useMemo(() => rankRows(ranks, devices, findings), [ranks, devices, findings]);
  if (rows.length === 0) return <Empty>No rank runs: the job has no generation at present.</Empty>;
  return (
    <>
      <Section title="Who holds it up?" aside={`${plural(ranks.size, "rank")} of generation ${ranks.generation} · ${named(findings)}`}>
        <RankTable rows={rows} open={open} onRank={onRank} />
      </Section>
      <Standbys workers={ranks.workers} />
    </>
  );
}
