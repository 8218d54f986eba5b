import { describe, expect, it } from "vitest";
import type { Event, History } from "../src/api/types";
import { kindOf, MAX_EVENTS, merge, mergeEvents, mergeHistory } from "../src/live/append";

const event = (revision: number, text = "happened"): Event => ({ revision, unix_ms: revision * 1000, kind: "k", job: "gpt", text });
const history = (from: number, values: (number | null)[], name = "loss", interval = 1000): History => ({
  from_unix_ms: from, interval_ms: interval, series: { [name]: { unit: "", values } },
});

describe("kindOf", () => {
  it("tells the paths that grow from those that are replaced", () => {
    expect(kindOf("/events")).toBe("events");
    expect(kindOf("/jobs/gpt/events")).toBe("events");
    expect(kindOf("/jobs/gpt/history?interval_ms=1000")).toBe("history");
    expect(kindOf("/jobs/events")).toBe("whole"); // a job of that name
    expect(kindOf("/jobs/history")).toBe("whole");
    expect(kindOf("/jobs/gpt/ranks")).toBe("whole");
  });
});

describe("events", () => {
  it("puts newer ones first, and each once however often it comes", () => {
    const merged = mergeEvents({ events: [event(2), event(1)] }, { events: [event(3), event(2)] });
    expect(merged.events.map((each) => each.revision)).toEqual([3, 2, 1]);
  });

  it("keeps two that happened at one revision", () => {
    expect(mergeEvents({ events: [event(1, "a")] }, { events: [event(1, "b")] }).events).toHaveLength(2);
  });

  it("is bounded, and drops the oldest", () => {
    const many = Array.from({ length: MAX_EVENTS }, (_, i) => event(MAX_EVENTS - i));
    const merged = mergeEvents({ events: many }, { events: [event(MAX_EVENTS + 1)] });
    expect(merged.events).toHaveLength(MAX_EVENTS);
    expect(merged.events[0]?.revision).toBe(MAX_EVENTS + 1);
    expect(merged.events.at(-1)?.revision).toBe(2);
  });
});

describe("history", () => {
  it("appends what is newer", () => {
    const merged = mergeHistory(history(0, [1, 2]), history(2000, [3]));
    expect(merged.series.loss?.values).toEqual([1, 2, 3]);
    expect(merged.from_unix_ms).toBe(0);
  });

  it("takes the newer value where a reconnect brings the same time again", () => {
    expect(mergeHistory(history(0, [1, 2, 3]), history(1000, [20, 30, 40])).series.loss?.values).toEqual([1, 20, 30, 40]);
  });

  it("leaves null where nobody has a value", () => {
    expect(mergeHistory(history(0, [1]), history(3000, [4])).series.loss?.values).toEqual([1, null, null, 4]);
  });

  it("gives all series one length when a name begins or ends", () => {
    const merged = mergeHistory(history(0, [1, 2]), history(2000, [9], "grad_norm"));
    expect(merged.series).toEqual({
      loss: { unit: "", values: [1, 2, null] },
      grad_norm: { unit: "", values: [null, null, 9] },
    });
  });

  it("is bounded, and drops the oldest", () => {
    const merged = mergeHistory(history(0, Array<number>(600).fill(1)), history(600_000, [2, 3]));
    expect(merged.series.loss?.values).toHaveLength(600);
    expect(merged.from_unix_ms).toBe(2000);
    expect(merged.series.loss?.values.at(-1)).toBe(3);
  });

  it("begins anew with another interval", () => {
    const other = history(0, [5], "loss", 15000);
    expect(mergeHistory(history(0, [1]), other)).toBe(other);
  });
});

describe("merge", () => {
  it("replaces all other paths", () => {
    const body = { jobs: [] };
    expect(merge("/jobs", { jobs: [1] }, body)).toBe(body);
  });
});
