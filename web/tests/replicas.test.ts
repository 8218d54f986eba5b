import { describe, expect, it } from "vitest";
import { bases, order, pauseMs } from "../src/live/replicas";

const R = ["", "http://r2", "http://r3"];
const replica = (http_url: string) => ({
  replica: "r", address: "", http_url, version: "", leader: false, ready: true, reason: "", answered: false, unreachable: false, unreachable_since_unix_ms: null,
});

describe("which replica comes next", () => {
  it("is the same once more when a stream broke, then the others in turn", () => {
    expect(order("", R, false)).toEqual(["", "http://r2", "http://r3"]);
    expect(order("http://r2", R, false)).toEqual(["http://r2", "http://r3", ""]);
  });

  it("is another one when it was silent, and the silent one last", () => {
    expect(order("http://r3", R, true)).toEqual(["", "http://r2", "http://r3"]);
  });

  it("is the page's own when no other is known, silent or not", () => {
    expect(order("", [], true)).toEqual([""]);
    expect(order("", [], false)).toEqual([""]);
  });

  it("does not lose one that has left the list", () => {
    expect(order("http://gone", R, false)).toEqual(["http://gone", ...R]);
  });
});

describe("the bases of a cluster", () => {
  it("are its URLs, with the page's own as empty, without those that serve nothing", () => {
    const replicas = [replica("http://r1/"), replica(""), replica("http://r2"), replica("http://r2")];
    expect(bases({ replicas }, "http://r1")).toEqual(["", "http://r2"]);
  });
});

describe("the pause between rounds", () => {
  it("grows to five seconds", () => {
    expect([0, 1, 2, 3, 4, 5, 20].map(pauseMs)).toEqual([250, 500, 1000, 2000, 4000, 5000, 5000]);
  });
});
