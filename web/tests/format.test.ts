import { describe, expect, it } from "vitest";
import { age, bytes, clock, compact, count, duration, percent, plural, significant } from "../src/format/format";

describe("numbers", () => {
  it.each([[0, "0"], [0.316, "0.316"], [2.4, "2.40"], [59.96, "60.0"], [1234.5, "1235"], [3e-4, "3.00e-4"], [-2.5, "-2.50"], [null, "–"], [Number.NaN, "–"]])(
    "significant(%s) is %s", (value, text) => expect(significant(value)).toBe(text),
  );
  it.each([[999, "999"], [12_345, "12.3 k"], [4_560_000, "4.56 M"], [1.2e12, "1.20 T"], [undefined, "–"]])(
    "compact(%s) is %s", (value, text) => expect(compact(value)).toBe(text),
  );
  it("counts with separators", () => expect(count(1234567)).toBe("1,234,567"));
  it("has a word for one", () => expect([plural(1, "rank"), plural(2, "rank")]).toEqual(["1 rank", "2 ranks"]));
  it("shows a share", () => expect(percent(0.9299)).toBe("93.0\u00a0%"));
});

describe("sizes", () => {
  it.each([[0, "0 B"], [999, "999 B"], [999_999, "1.00 MB"], [13_400_000_000, "13.4 GB"], [null, "–"]])(
    "bytes(%s) is %s", (value, text) => expect(bytes(value).replace("\u00a0", " ")).toBe(text),
  );
});

describe("times", () => {
  it.each([
    [0, "0 s"], [0.25, "250 µs"], [310, "310 ms"], [1240, "1.24 s"], [31_840, "31.8 s"], [59_990, "1 min"], [725_000, "12 min 5 s"],
    [3_600_000, "1 h"], [7_930_000, "2 h 12 min"], [273_600_000, "3 d 4 h"], [null, "–"],
  ])("duration(%s) is %s", (value, text) => expect(duration(value)).toBe(text));
  it.each([[400, "< 1 s"], [2999, "2 s"], [125_000, "2 min"], [7_265_000, "2 h 1 min"], [null, "–"]])(
    "age(%s) is %s", (value, text) => expect(age(value)).toBe(text),
  );
  it("names the day only of another day", () => {
    const noon = new Date(2026, 10, 25, 12, 0, 5).getTime();
    expect(clock(noon, noon)).toBe("12:00:05");
    expect(clock(noon - 86_400_000, noon)).toBe("24 Nov 12:00");
  });
});
