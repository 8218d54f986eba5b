import { useEffect, useState } from "react";
import type { Phase } from "../live/connection";
import { useLive, useLiveState } from "../live/hooks";
import { age } from "../format/format";
import { Dot } from "../ui/tone";

const OLD_MS = 3000;

/** Whether the shown data is current, and the replica that it comes from. */
export function LiveBadge({ replica }: { replica: string }) {
  const live = useLive();
  const { phase, problem } = useLiveState();
  const [oldMs, setOldMs] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => {
      const since = live.heardAt === null ? 0 : performance.now() - live.heardAt;
      setOldMs(since > OLD_MS ? Math.floor(since / 1000) * 1000 : 0);
    }, 1000);
    return () => clearInterval(timer);
  }, [live]);
  return (
    <span title={problem?.error} className="inline-flex items-center gap-1.5">
      <span role="status" className="inline-flex items-center gap-1.5">{words(phase, replica, live.heardAt !== null)}</span>
      {oldMs > 0 && <span>· data is {age(oldMs)} old</span>}
    </span>
  );
}

function words(phase: Phase, replica: string, heard: boolean) {
  switch (phase) {
    case "live":
      return <><Dot tone="good" />live{replica && ` from ${replica}`}</>;
    case "connecting":
      return <><Dot tone="warn" pulse />{heard ? "reconnecting…" : "connecting…"}</>;
    case "lost":
      return <><Dot tone="bad" />no replica answers</>;
    case "unauthorized":
      return <><Dot tone="idle" />signed out</>;
  }
}
