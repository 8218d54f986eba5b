import { describe, expect, it } from "vitest";
import type { Finding } from "../src/api/types";
import { findingKey, noticeSentence } from "../src/pages/job/sentences";
import { toneOfFinding, worstTone } from "../src/ui/tone";

const finding = (some: Partial<Finding>): Finding => ({ kind: "slow", text: "", ranks: [], worker_id: "", host: "", device: null, cause: "", since_ms: null, ...some });

describe("findings", () => {
  it("have a key each, also two of one kind about no rank", () => {
    const found = [
      finding({ kind: "invariant", cause: "two leaders" }), finding({ kind: "invariant", cause: "no world" }),
      finding({ ranks: [1], host: "a" }), finding({ ranks: [1], host: "b" }), finding({ ranks: [1, 2] }), finding({ worker_id: "1,2" }),
    ];
    expect(new Set(found.map(findingKey)).size).toBe(found.length);
  });

  it("keep their key while their text and age change", () => {
    expect(findingKey(finding({ text: "for 3 s", since_ms: 3000 }))).toBe(findingKey(finding({ text: "for 4 s", since_ms: 4000 })));
  });

  it("are bad unless the job goes on in spite of them: a crashed rank stops it", () => {
    expect(["crashed", "stalled", "device", "invariant", "slow", "held"].map(toneOfFinding)).toEqual(["bad", "bad", "bad", "bad", "warn", "warn"]);
    expect([worstTone([]), worstTone([finding({})]), worstTone([finding({}), finding({ kind: "crashed" })])]).toEqual([null, "warn", "bad"]);
  });
});

describe("a notice", () => {
  const notice = { action: "preempt", reason: "the node goes", workers: [] as string[], grace_ms: 30_000, stopped: 1, ranks: 4 };

  it("asks all ranks to stop", () => {
    expect(noticeSentence(notice)).toBe("All ranks are requested to stop (preempt): the node goes. 1 of 4 have stopped; they have 30.0 s.");
  });

  it("names who is to leave", () => {
    const drain = { ...notice, action: "drain", workers: ["w1", "w2"] };
    expect(noticeSentence(drain)).toMatch(/^All ranks are requested to stop, and w1, w2 to leave \(drain\): the node goes\./);
    expect(noticeSentence({ ...drain, workers: [..."abcdefg"] })).toContain("a, b, c, d, e and 2 more to leave");
  });
});
