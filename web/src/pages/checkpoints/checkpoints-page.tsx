import { useState } from "react";
import type { Action, Checkpoint, Checkpoints } from "../../api/types";
import { bytes, count } from "../../format/format";
import { useMe, useResource } from "../../live/hooks";
import { Pager } from "../../ui/pager";
import { PageTitle, Section } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import { ActionDialog } from "./action-dialog";
import { CheckpointTable } from "./checkpoint-table";
import { CheckpointTimeline } from "./checkpoint-timeline";

export interface Asked {
  readonly action: Action;
  readonly checkpoint: Checkpoint;
  readonly tag: string;
}

/** The job's checkpoints, their copies, and whether they are intact. */
export default function CheckpointsPage({ job }: { job: string }) {
  const [token, setToken] = useState("");
  const [asked, setAsked] = useState<Asked | null>(null);
  const path = `/jobs/${encodeURIComponent(job)}/checkpoints${token && `?page_token=${encodeURIComponent(token)}`}`;
  const resource = useResource<Checkpoints>(path, { keep: true });
  const me = useMe();
  return (
    <div className="grid gap-5">
      <PageTitle title={`Checkpoints of ${job}`} hidden />
      <Loaded of={resource}>
        {(data) =>
          data.checkpoints.length === 0 ? <Empty>Nothing was saved yet.</Empty> : (
            <>
              <Section title="What was saved?" aside={sums(data)}>
                <CheckpointTimeline checkpoints={data.checkpoints} />
              </Section>
              <Section title="Where is it, and can it be trusted?">
                <CheckpointTable checkpoints={data.checkpoints} mayOperate={me?.may_operate === true} onAsk={setAsked} />
                <Pager shown={data.checkpoints.length} total={data.total} first={token === ""} next={data.next_page_token} onFirst={() => setToken("")} onNext={setToken} />
              </Section>
            </>
          )
        }
      </Loaded>
      {asked && <ActionDialog job={job} path={path} asked={asked} onClose={() => setAsked(null)} />}
    </div>
  );
}

function sums({ checkpoints, total }: Checkpoints): string {
  const size = checkpoints.reduce((sum, each) => sum + each.size_bytes, 0);
  const shared = checkpoints.filter((each) => each.references > 0).reduce((sum, each) => sum + each.size_bytes, 0);
  const these = checkpoints.length < total ? `the newest ${checkpoints.length} of ${count(total)}` : count(total);
  return `${these}: ${bytes(size)}${shared > 0 ? `, ${bytes(shared)} of it used by others, too` : ""}`;
}
