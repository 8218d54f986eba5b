import { useDeferredValue, useState } from "react";
import type { Cluster, Jobs } from "../../api/types";
import { useResource } from "../../live/hooks";
import { Link } from "../../route/link";
import { setQuery, useRoute } from "../../route/route";
import { PageTitle } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import { Note } from "../../ui/tone";
import { Pager } from "../../ui/pager";
import { useNarrow } from "../../ui/use-media";
import { JobCards } from "./job-cards";
import { JobTable } from "./job-table";

const PHASES = ["running", "waiting", "stopping", "paused", "failed", "done"];

/** Which jobs move, and which do not. */
export function JobsPage() {
  const { query } = useRoute();
  const phase = query.get("phase") ?? "";
  const q = query.get("q") ?? "";
  const [page, setPage] = useState<{ token: string; of: string }>({ token: "", of: "" });
  const filter = `${phase} ${q}`;
  const token = page.of === filter ? page.token : "";
  const path = useDeferredValue(jobsPath(phase, q, token));
  const jobs = useResource<Jobs>(path, { keep: true });
  const { data: cluster } = useResource<Cluster>("/cluster");
  const narrow = useNarrow();
  return (
    <div className="grid gap-3">
      <PageTitle title="Jobs">
        {cluster && <Counts cluster={cluster} />}
      </PageTitle>
      {cluster && !cluster.healthy && <Note tone="bad">{cluster.reason}</Note>}
      <div className="flex flex-wrap items-center gap-2" role="search">
        <label>
          <span className="sr-only">Search by name</span>
          <input className="field w-56" type="search" placeholder="Search by name" value={q} onChange={(event) => setQuery("q", event.target.value)} />
        </label>
        <label>
          <span className="sr-only">Phase</span>
          <select className="field" value={phase} onChange={(event) => setQuery("phase", event.target.value)}>
            <option value="">all phases</option>
            {PHASES.map((each) => <option key={each}>{each}</option>)}
          </select>
        </label>
      </div>
      <Loaded of={jobs}>
        {(data) =>
          data.jobs.length === 0 ? (
            <Empty>
              {phase || q ? "No job matches." : <>No job yet. <code>strata run</code> starts one; it appears here as soon as its first member registers.</>}
            </Empty>
          ) : (
            <>
              {narrow ? <JobCards jobs={data.jobs} /> : <JobTable jobs={data.jobs} />}
              <Pager shown={data.jobs.length} total={data.total} first={token === ""} next={data.next_page_token}
                onFirst={() => setPage({ token: "", of: filter })} onNext={(next) => setPage({ token: next, of: filter })} />
            </>
          )
        }
      </Loaded>
    </div>
  );
}

function Counts({ cluster }: { cluster: Cluster }) {
  const parts = PHASES.filter((phase) => cluster.jobs_by_phase[phase]).map((phase) => `${cluster.jobs_by_phase[phase]} ${phase}`);
  return (
    <p className="text-soft">
      {parts.join(", ")}
      {cluster.alarms.length > 0 && <> · <Link to="/cluster" className="text-warn underline underline-offset-2">the cluster has alarms</Link></>}
    </p>
  );
}

function jobsPath(phase: string, q: string, token: string): string {
  const query = new URLSearchParams();
  if (phase) query.set("phase", phase);
  if (q) query.set("q", q);
  if (token) query.set("page_token", token);
  const text = query.toString();
  return text ? `/jobs?${text}` : "/jobs";
}
