/** Apply a change to the shown data: `events` and `history` grow at their end, all else is replaced. */
import type { Events, History, Series } from "../api/types";

export const MAX_EVENTS = 500;
/** As many as a replica keeps: ten minutes by the second, a day by fifteen seconds. */
export const MAX_POINTS: Readonly<Record<number, number>> = { 1000: 600, 15000: 5760 };

export type Kind = "events" | "history" | "whole";

export function kindOf(path: string): Kind {
  const bare = path.split("?", 1)[0] ?? "";
  if (bare === "/events" || /^\/jobs\/[^/]+\/events$/.test(bare)) return "events";
  return /^\/jobs\/[^/]+\/history$/.test(bare) ? "history" : "whole";
}

/** Return the data of `path` once `body` has arrived after `before`. */
export function merge(path: string, before: unknown, body: unknown): unknown {
  if (before === undefined || before === null) return body;
  switch (kindOf(path)) {
    case "events":
      return mergeEvents(before as Events, body as Events);
    case "history":
      return mergeHistory(before as History, body as History);
    case "whole":
      return body;
  }
}

/** Return all events of both, the newest first, each once. A reconnect may bring some again. */
export function mergeEvents(before: Events, newer: Events): Events {
  const key = (each: Events["events"][number]) => `${each.revision} ${each.kind} ${each.job} ${each.text}`;
  const known = new Set(newer.events.map(key));
  const events = [...newer.events, ...before.events.filter((each) => !known.has(key(each)))];
  events.sort((a, b) => b.revision - a.revision || b.unix_ms - a.unix_ms);
  return { events: events.slice(0, MAX_EVENTS) };
}

/** Return the values of both on one time axis: `newer` wins where they overlap, and a value that neither has is null. */
export function mergeHistory(before: History, newer: History): History {
  const interval = newer.interval_ms;
  if (before.interval_ms !== interval) return newer;
  const most = MAX_POINTS[interval] ?? 600;
  const end = Math.max(endOf(before), endOf(newer));
  const begin = Math.max(Math.min(before.from_unix_ms, newer.from_unix_ms), end - most * interval);
  const length = Math.round((end - begin) / interval);
  const series: Record<string, Series> = {};
  for (const name of new Set([...Object.keys(before.series), ...Object.keys(newer.series)])) {
    const values = new Array<number | null>(length).fill(null);
    for (const each of [before, newer]) place(each, name, values, begin);
    series[name] = { unit: (newer.series[name] ?? before.series[name])?.unit ?? "", values };
  }
  return { from_unix_ms: begin, interval_ms: interval, series };
}

function place(from: History, name: string, values: (number | null)[], begin: number): void {
  const own = from.series[name]?.values ?? [];
  const shift = Math.round((from.from_unix_ms - begin) / from.interval_ms);
  for (let i = Math.max(0, -shift); i < own.length; i++) values[i + shift] = own[i] ?? null;
}

function endOf(history: History): number {
  const length = Object.values(history.series)[0]?.values.length ?? 0;
  return history.from_unix_ms + length * history.interval_ms;
}
