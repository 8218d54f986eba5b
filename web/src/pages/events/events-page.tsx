import { useState } from "react";
import type { Event, Events } from "../../api/types";
import { clock, iso } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Link } from "../../route/link";
import { jobPath } from "../../route/route";
import { PageTitle } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";

/** The events of one job, or of all, with their reasons. */
export function EventsPage({ job }: { job?: string }) {
  const events = useResource<Events>(job === undefined ? "/events" : `/jobs/${encodeURIComponent(job)}/events`);
  const [text, setText] = useState("");
  return (
    <div className="grid gap-3">
      <PageTitle title={job === undefined ? "Events" : `Events of ${job}`} hidden={job !== undefined} />
      <label className="justify-self-start">
        <span className="sr-only">Show events that contain</span>
        <input className="field w-56" type="search" placeholder="Filter these events" value={text} onChange={(event) => setText(event.target.value)} />
      </label>
      <Loaded of={events}>{(data) => <List events={data.events} text={text.toLowerCase()} withJob={job === undefined} />}</Loaded>
    </div>
  );
}

function List({ events, text, withJob }: { events: readonly Event[]; text: string; withJob: boolean }) {
  const found = text ? events.filter((each) => `${each.kind} ${each.job} ${each.text}`.toLowerCase().includes(text)) : events;
  if (found.length === 0) return <Empty>{events.length === 0 ? "Nothing has happened yet." : "No event contains that."}</Empty>;
  return (
    <ol className="divide-y divide-line border-y border-line">
      {found.slice(0, 300).map((each) => (
        <li key={`${each.revision} ${each.kind} ${each.job} ${each.text}`} className="grid grid-cols-[5.5rem_minmax(0,1fr)] gap-x-3 py-1 sm:grid-cols-[6.5rem_8rem_minmax(0,1fr)_auto]">
          <time dateTime={iso(each.unix_ms)} className="text-soft">{clock(each.unix_ms)}</time>
          {withJob ? (each.job ? <Link to={jobPath(each.job)} className="link truncate">{each.job}</Link> : <span className="text-soft">cluster</span>) : <span className="truncate text-soft max-sm:hidden">{each.kind.replaceAll("_", " ")}</span>}
          <span className="max-sm:col-span-2">{each.text}</span>
          <span className="text-[12px] text-soft max-sm:hidden">{withJob && each.kind.replaceAll("_", " ")}</span>
        </li>
      ))}
    </ol>
  );
}
