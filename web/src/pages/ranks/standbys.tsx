import type { Ranks } from "../../api/types";
import { age } from "../../format/format";
import { Section } from "../../ui/section";
import { State } from "../../ui/tone";

/** Members that have no rank, and those that were lost or leave. */
export function Standbys({ workers }: { workers: Ranks["workers"] }) {
  const shown = workers.filter((each) => each.standby || each.lost || each.leaving);
  if (shown.length === 0) return null;
  return (
    <Section title="Members without a rank, lost or leaving">
      <ul className="grid gap-1">
        {shown.map((each) => (
          <li key={each.worker_id} className="flex flex-wrap gap-x-4">
            <span className="font-medium">{each.worker_id}</span>
            <State tone={each.lost ? "bad" : each.leaving ? "warn" : "idle"}>{each.lost ? "lost" : each.leaving ? "leaving" : "standby"}</State>
            <span className="text-soft">{each.host}, {each.slots} slots, heartbeat {age(each.heartbeat_age_ms)} ago</span>
          </li>
        ))}
      </ul>
    </Section>
  );
}
