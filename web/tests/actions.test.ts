import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, describe, expect, it, vi } from "vitest";
import { act, ApiError, get } from "../src/api/client";
import type { Checkpoint, Checkpoints } from "../src/api/types";
import { consequence, forkOutcome, isOutcomeUnknown, obstacles, outcome, withAnswer } from "../src/pages/checkpoints/actions";
import { toneOfCheckpoint } from "../src/ui/tone";

vi.stubGlobal("sessionStorage", { getItem: () => null });

const checkpoint = (some: Partial<Checkpoint> = {}): Checkpoint => ({
  step: 40, attempt: "a40", generation: 2, epoch: 0, type: "full", state: "committed", acked: 4, ranks: 4, missing_ranks: "", size_bytes: 13_400_000_000,
  created_unix_ms: 0, path: "", reason: "", latest: false, pinned: false, tags: [], base_step: null, origin_job: "", references: 0, readers: 0, suspected: [],
  copies: [{ tier: "nvme", path: "", state: "present", shared: false }, { tier: "s3", path: "", state: "removed", shared: true }], ...some,
});
const catalog = (checkpoints: Checkpoint[], next = ""): Checkpoints => ({ checkpoints, total: checkpoints.length, next_page_token: next });

describe("what a deletion is said to do", () => {
  it("is what the coordinators do", () => {
    const words = consequence("delete", checkpoint(), "gpt").replace("\u00a0", " ");
    expect(words).toBe("It cannot be restored from now on. The processes of gpt remove its 13.4 GB in nvme, for good, as soon as they run.");
  });

  it("is a refusal of the latest, and of what is kept or used", () => {
    expect(consequence("delete", checkpoint({ latest: true }), "gpt")).toBe("The coordinators refuse this as long as it is the latest.");
    expect(obstacles(checkpoint({ pinned: true, tags: ["best", "paper"], readers: 1 }))).toEqual(["it is pinned", "it is tagged best, paper", "it is being read"]);
    expect(consequence("delete", checkpoint({ references: 1 }), "gpt"), "one user is enough").toContain("other checkpoints or jobs use its bytes");
  });

  it("takes nothing from the job whose bytes a fork uses", () => {
    expect(consequence("delete", checkpoint({ origin_job: "base" }), "gpt")).toBe("Its record is deleted at once. The bytes are those of job base, and stay.");
  });
});

describe("the tones of states", () => {
  it("tell what is damaged and given up from what goes on and what goes away", () => {
    expect(["committed", "open", "prepared", "corrupt", "aborted", "deleting"].map(toneOfCheckpoint)).toEqual(["good", "warn", "warn", "bad", "bad", "idle"]);
  });
});

describe("an action without an answer", () => {
  let server: Server | undefined;
  afterEach(() => server?.close());

  async function answering(status: number | null): Promise<unknown> {
    const made = createServer((_request, response) => void (status === null ? response.destroy() : response.writeHead(status).end('{"error":"no"}')));
    server = made;
    await new Promise<void>((resolve) => made.listen(0, "127.0.0.1", resolve));
    const base = `http://127.0.0.1:${(made.address() as AddressInfo).port}`;
    return act(base, "gpt", 40, "pin", {}).catch((error: unknown) => error);
  }

  it("may have been done if the answer breaks off, and is no error if the caller leaves", async () => {
    const made = createServer((_request, response) => void response.writeHead(200, { "Content-Length": 1000 }).write("{", () => response.destroy()));
    server = made;
    await new Promise<void>((resolve) => made.listen(0, "127.0.0.1", resolve));
    const base = `http://127.0.0.1:${(made.address() as AddressInfo).port}`;
    const error: unknown = await act(base, "gpt", 40, "pin", {}).catch((each: unknown) => each);
    expect(error).toBeInstanceOf(ApiError);
    expect([(error as ApiError).message, isOutcomeUnknown(error)]).toEqual(["The replica's answer broke off", true]);
    const left = new AbortController();
    const asked = get(base, "/jobs", left.signal).catch((each: unknown) => each);
    left.abort();
    expect(await asked).not.toBeInstanceOf(ApiError);
  });

  it("may have been done, and so it may if the replica cannot tell", async () => {
    for (const status of [null, 500, 503]) {
      const error = await answering(status);
      expect(error).toBeInstanceOf(ApiError);
      expect(isOutcomeUnknown(error), String(status)).toBe(true);
    }
  });

  it("was not done if it was refused", async () => {
    for (const status of [400, 401, 403, 404, 409]) expect(isOutcomeUnknown(await answering(status)), String(status)).toBe(false);
  });

  it("is seen in the catalog once it is done, and not before", () => {
    const asked = checkpoint({ tags: ["old"] });
    const says = (action: "pin" | "tag" | "untag", now: Partial<Checkpoint>, tag = "") => outcome(action, asked, catalog([checkpoint(now)]), tag);
    expect(outcome("pin", asked, undefined, "")).toBe("");
    expect([says("pin", {}), says("pin", { pinned: true })]).toEqual(["", "It is pinned now."]);
    expect([says("tag", { tags: ["old"] }, "new"), says("tag", { tags: ["new", "old"] }, "new")]).toEqual(["", "It is tagged new now."]);
    expect([says("untag", { tags: ["old"] }, "old"), says("untag", {}, "old")]).toEqual(["", "It is not tagged old any more."]);
    expect(outcome("unpin", checkpoint({ pinned: true }), catalog([checkpoint()]), "")).toBe("It is not pinned any more.");
    expect(outcome("pin", asked, catalog([checkpoint({ attempt: "other", pinned: true })]), ""), "another attempt").toBe("");
  });

  it("does not take a checkpoint for deleted that moved to the next page", () => {
    const asked = checkpoint();
    const newer = checkpoint({ step: 60, attempt: "a60" }), older = checkpoint({ step: 20, attempt: "a20" });
    expect(outcome("delete", asked, catalog([newer, checkpoint(), older]), "")).toBe("");
    expect(outcome("delete", asked, catalog([newer, checkpoint({ state: "deleting" })]), "")).toBe("It is being deleted.");
    expect(outcome("delete", asked, catalog([newer], "more"), "")).toBe("");
    expect(outcome("delete", asked, catalog([newer, older], "more"), "")).toBe("It is deleted.");
    expect(outcome("delete", asked, catalog([newer]), "")).toBe("It is deleted.");
  });

  it("finds a fork in the new job, and no other fork", () => {
    const fork = (some: Partial<Checkpoint>) => catalog([checkpoint({ generation: 0, ...some })]);
    expect(forkOutcome(checkpoint(), "gpt", "next", undefined)).toBe("");
    expect(forkOutcome(checkpoint(), "gpt", "next", fork({ origin_job: "gpt", attempt: "a20" }))).toBe("");
    expect(forkOutcome(checkpoint(), "gpt", "next", fork({ origin_job: "gpt" }))).toBe("Job next begins from it.");
  });
});

describe("an answer", () => {
  it("is shown in place of what was there; a record that is gone is gone", () => {
    const before = catalog([checkpoint({ step: 60, attempt: "a60" }), checkpoint()]);
    expect(withAnswer(before, checkpoint(), checkpoint({ pinned: true }))?.checkpoints.map((each) => each.pinned)).toEqual([false, true]);
    expect(withAnswer(before, checkpoint(), null)).toEqual({ checkpoints: [checkpoint({ step: 60, attempt: "a60" })], total: 1, next_page_token: "" });
    expect(withAnswer(undefined, checkpoint(), null)).toBeUndefined();
  });
});
