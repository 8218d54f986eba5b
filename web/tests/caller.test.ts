import { describe, expect, it } from "vitest";
import { signing } from "../src/shell/caller";

describe("signing in", () => {
  it("is offered to nobody but the anonymous where tokens are taken", () => {
    expect(signing({ identity: "", takes_tokens: true }, false)).toBe("in");
    expect(signing({ identity: "", takes_tokens: false }, false), "a cluster that asks nobody").toBeNull();
    expect(signing({ identity: "ada", takes_tokens: true }, false), "a certificate").toBeNull();
    expect(signing(undefined, false), "not known yet").toBeNull();
  });

  it("is undone where it was done: with a token that is kept in the tab", () => {
    expect(signing({ identity: "ada", takes_tokens: true }, true)).toBe("out");
  });
});
