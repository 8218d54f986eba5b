import { describe, expect, it } from "vitest";
import type { Device, Finding, Heatmap, Ranks } from "../src/api/types";
import { cells, heat, longest, median } from "../src/charts/heat";
import { balance } from "../src/pages/data/balance";
import { isSlow, label, named, rankRows } from "../src/pages/ranks/rank-rows";

const worker = (worker_id: string, first_rank: number | null, slots = 2) => ({
  worker_id, first_rank, slots, incarnation: 1, host: `host-of-${worker_id}`, pid: 1, standby: first_rank === null, lost: false, done: false, leaving: false, heartbeat_age_ms: 40,
});
const device = (worker_id: string, index: number): Device => ({
  worker_id, index, name: "", uuid: `${worker_id}${index}`, utilization_percent: 90, memory_used_bytes: null, memory_total_bytes: null,
  temperature_c: null, power_mw: null, ecc_uncorrected: null, xids: [], fault: "",
});
const finding = (some: Partial<Finding>): Finding => ({ kind: "", text: "", ranks: [], worker_id: "", host: "", device: null, cause: "", since_ms: null, ...some });
const RANKS: Ranks = {
  generation: 1, size: 4, workers: [worker("a", 0), worker("b", 2)], worker: [0, 0, 1, -1], step: [10, 9, null, 10], phases: ["step", "save"], phase: [0, 1, 0, 0],
  last_seen_ms: [1, 2, null, 3], stalled_ms: [0, 0, 0, 0], compute_us: [100, 200, null, 100], median_compute_us: [100, 200, null, 100],
  relative_score: [1, 0.5, null, 1], own_score: [1, 1, null, 1],
};

describe("rows of ranks", () => {
  it("says who is behind, and on which device", () => {
    const rows = rankRows(RANKS, { devices: [device("a", 0), device("a", 1)] }, []);
    expect(rows.map((row) => row.behind)).toEqual([0, 1, 0, 0]);
    expect(rows.map((row) => row.device?.uuid ?? null)).toEqual(["a0", "a1", null, null]);
    expect(rows[1]).toMatchObject({ host: "host-of-a", phase: "save", relative: 0.5, heartbeatMs: 40 });
    expect(rows[3]).toMatchObject({ host: "", heartbeatMs: null });
  });

  it("says whose member has ended with its ranks", () => {
    const ended = { ...worker("b", 2), host: "", done: true };
    const rows = rankRows({ ...RANKS, workers: [worker("a", 0), ended] }, undefined, []);
    expect(rows.map((row) => [row.done, row.lost])).toEqual([[false, false], [false, false], [true, false], [false, false]]);
  });

  it("names no device where a member has fewer than slots", () => {
    expect(rankRows(RANKS, { devices: [device("a", 0)] }, [])[0]?.device).toBeNull();
  });

  it("accuses nobody by itself: half as fast as the others, or stuck, is what the replicas judge", () => {
    const rows = rankRows({ ...RANKS, stalled_ms: [0, 0, 9000, 0] }, undefined, []);
    expect(rows.map((row) => [row.findings, row.worst])).toEqual(rows.map(() => [[], null]));
    expect(named([])).toBe("No finding names a rank.");
  });

  it("marks the ranks that findings name, with the cause", () => {
    const slow = finding({ kind: "slow", cause: "data", ranks: [1, 3] });
    const stalled = finding({ kind: "stalled", cause: "", ranks: [3] });
    const device = finding({ kind: "device", cause: "Xid 79", worker_id: "a", device: 0 });
    const rows = rankRows(RANKS, undefined, [device, stalled, slow]);
    expect(rows.map((row) => row.findings.map(label))).toEqual([[], ["slow (data)"], [], ["stalled", "slow (data)"]]);
    expect(rows.map((row) => row.worst)).toEqual([null, 2, null, 1]);
    expect(rows.map((row) => isSlow(row.findings))).toEqual([false, true, false, true]);
    expect(named([device, stalled, slow])).toBe("Rank 3: stalled · Ranks 1, 3: slow (data)");
  });

  it("names so many findings and ranks, and how many more there are", () => {
    const many = finding({ kind: "slow", cause: "host", ranks: [0, 1, 2, 3, 4, 5, 6] });
    expect(named([many, many, many, many])).toMatch(/^Ranks 0, 1, 2, 3, 4 and 2 more: slow \(host\) · .* · 1 more$/);
  });
});

describe("the heat map", () => {
  const map = (columns: (number | null)[][]): Heatmap => ({ generation: 1, from_unix_ms: 0, interval_ms: 1000, ranks: columns[0]?.length ?? 0, columns });

  it("shows the slowest of the ranks that share a row", () => {
    const column = Array<number>(1000).fill(100);
    column[417] = 200;
    const found = cells(map([column]), 100, 100);
    expect(found[41]).toBe(255);
    expect(Math.max(...found.filter((_, row) => row !== 41))).toBe(1);
  });

  it("leaves out what was not reported", () => {
    expect([...cells(map([[null, 100]]), 2, 100)]).toEqual([0, 1]);
  });

  it("is cool near the median, hot far from it", () => {
    expect([90, 100, 110, 140, 170, 900].map((value) => heat(value, 100))).toEqual([0, 0, expect.closeTo(0), expect.closeTo(0.5), expect.closeTo(1), 1]);
    expect(heat(5, 0)).toBe(0);
  });

  it("names the longest times as what they are, and judges nobody", () => {
    const columns = [[100, 100, 150, 130], [100, 100, 150, 130]];
    expect(longest(map(columns), median(columns), 1)).toEqual([{ rank: 2, factor: 150 / 130 }]);
    expect(longest(map(columns), 100).map((each) => each.rank)).toEqual([2, 3, 0]);
    expect(longest(map([[null, null]]), 0)).toEqual([]);
  });
});

describe("balance", () => {
  it("is even within one shard or a quarter", () => {
    expect(balance({ a: 1, b: 2 }).even).toBe(true);
    expect(balance({ a: 6, b: 8 }).even).toBe(true);
    expect(balance({ a: 5, b: 8 })).toEqual({ low: 5, high: 8, even: false });
    expect(balance({})).toEqual({ low: 0, high: 0, even: true });
  });
});
