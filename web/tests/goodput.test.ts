import { describe, expect, it } from "vitest";
import { ledger } from "../src/format/goodput";

const goodput = (wall_s: number, seconds: Record<string, number>) => ({
  wall_s, ratio: (seconds.step ?? 0) / wall_s,
  parts: Object.entries(seconds).map(([cause, s]) => ({ cause, seconds: s, ratio: s / wall_s })),
});
const sum = (parts: { ratio: number }[]) => parts.reduce((total, part) => total + part.ratio, 0);

describe("the ledger of the wall time", () => {
  it("sums to 100 %", () => {
    const parts = ledger(goodput(1000, { step: 920, save: 50, lost: 30 }));
    expect(sum(parts)).toBeCloseTo(1, 10);
    expect(parts.map((part) => part.cause)).toEqual(["step", "save", "lost"]);
    expect(parts[0]?.useful).toBe(true);
  });

  it("has a part for what no cause explains, and still sums to 100 %", () => {
    const parts = ledger(goodput(1000, { step: 900, save: 50 }));
    expect(parts.at(-1)).toEqual({ cause: "unaccounted", seconds: 50, ratio: 0.05, useful: false });
    expect(sum(parts)).toBeCloseTo(1, 10);
  });

  it("does not show a rounding as a cause", () => {
    expect(ledger(goodput(1000, { step: 999.9 }))).toHaveLength(1);
  });

  it("never exceeds 100 %, whatever a replica says", () => {
    expect(sum(ledger(goodput(100, { step: 90, save: 20 })))).toBeCloseTo(1, 10);
  });

  it("holds at the very beginning", () => {
    expect(ledger({ wall_s: 0, ratio: 0, parts: [{ cause: "step", seconds: 0, ratio: 0 }] })[0]?.ratio).toBe(0);
  });
});
