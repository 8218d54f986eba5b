/** The stream against real servers: what is asked for, where it goes on, and what becomes of each change. */
import { QueryClient } from "@tanstack/react-query";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { authorization } from "../src/api/client";
import { Live } from "../src/live/connection";

interface Opened {
  readonly watch: string[];
  readonly lastId: string | undefined;
  readonly token: string | undefined;
  readonly response: ServerResponse;
  send(path: string, body: unknown, id: number): void;
}

/** A replica that does what the test says, and keeps what it was asked. */
class Replica {
  readonly streams: Opened[] = [];
  /** The one token that it takes from those who show any. */
  takes = "sesame";
  /** Nobody may look without a token. */
  asks = false;
  readonly answers = new Map<string, () => [number, unknown] | Promise<[number, unknown]>>();
  #server!: Server;
  origin = "";

  async start(): Promise<this> {
    this.#server = createServer((request, response) => void this.#serve(request, response));
    await new Promise<void>((resolve) => this.#server.listen(0, "127.0.0.1", resolve));
    this.origin = `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
    return this;
  }

  end(): void {
    this.#server.close();
    this.#server.closeAllConnections();
  }

  async #serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const url = new URL(request.url ?? "", "http://here");
    const path = url.pathname.replace("/api/v1", "");
    if (path !== "/stream") {
      const [status, body] = await (this.answers.get(path)?.() ?? [404, { error: "nothing is there", hint: "" }]);
      response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(body));
      return;
    }
    const shown = request.headers.authorization;
    if (shown === undefined ? this.asks : shown !== `Bearer ${this.takes}`) {
      response.writeHead(401, { "Content-Type": "application/json" }).end(JSON.stringify({ error: "who are you?", hint: "" }));
      return;
    }
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    response.write(": begin\n\n");
    this.streams.push({
      watch: url.searchParams.getAll("watch"),
      lastId: request.headers["last-event-id"] as string | undefined,
      token: request.headers.authorization,
      response,
      send: (of, body, id) => response.write(`event: change\nid: ${id}\ndata: ${JSON.stringify({ path: of, body })}\n\n`),
    });
  }
}

const kept = new Map<string, string>();
vi.stubGlobal("sessionStorage", {
  getItem: (key: string) => kept.get(key) ?? null,
  setItem: (key: string, value: string) => kept.set(key, value),
  removeItem: (key: string) => kept.delete(key),
});

vi.stubGlobal("location", { origin: "http://page" });
const send = globalThis.fetch;

const until = <T>(value: () => T) => vi.waitFor(() => {
  const found = value();
  if (!found) throw new Error("not yet");
  return found as NonNullable<T>;
}, { timeout: 8000, interval: 10 });
const event = (revision: number) => ({ revision, unix_ms: revision, kind: "k", job: "", text: `event ${revision}` });

describe("the stream", () => {
  let cache: QueryClient;
  let live: Live;
  let one: Replica;
  let two: Replica;

  beforeEach(async () => {
    [one, two] = await Promise.all([new Replica().start(), new Replica().start()]);
    kept.clear();
    kept.set("strata.replicas", JSON.stringify([one.origin, two.origin]));
    cache = new QueryClient();
    // "" cannot be reached from Node: the page's own replica is dead from the beginning
    live = new Live(cache, "http://page");
    void live.run();
  });

  /** Have the page come from a replica, as a browser has it. */
  function serve(page: Replica): void {
    live.stop();
    vi.stubGlobal("location", { origin: page.origin });
    vi.stubGlobal("fetch", (url: string, init: RequestInit) => send(url.startsWith("/") ? page.origin + url : url, init));
    live = new Live(cache, page.origin);
    void live.run();
  }

  afterEach(() => {
    vi.stubGlobal("location", { origin: "http://page" });
    vi.stubGlobal("fetch", send);
    live.stop();
    one.end();
    two.end();
  });

  it("watches the paths of all components, each once, and follows when they change", async () => {
    const stop = live.watch("/jobs");
    live.watch("/jobs");
    live.watch("/cluster");
    const first = await until(() => one.streams[0]);
    expect(first.watch).toEqual(["/cluster", "/jobs"]);
    stop();
    live.watch("/jobs/gpt");
    expect((await until(() => one.streams[1])).watch).toEqual(["/cluster", "/jobs", "/jobs/gpt"]);
  });

  it("writes changes to the cache, and appends those of events", async () => {
    live.watch("/jobs");
    live.watch("/events");
    const stream = await until(() => one.streams[0]);
    stream.send("/jobs", { total: 1 }, 1);
    stream.send("/jobs", { total: 2 }, 2);
    stream.send("/events", { events: [event(1)] }, 2);
    stream.send("/events", { events: [event(2)] }, 3);
    await until(() => (cache.getQueryData(["/events"]) as { events: unknown[] } | undefined)?.events.length === 2);
    expect(cache.getQueryData(["/jobs"])).toEqual({ total: 2 });
  });

  it("tries where it was when a stream ends, and goes elsewhere when nobody answers there", async () => {
    live.watch("/jobs");
    (await until(() => one.streams[0])).response.end();
    await until(() => one.streams[1]);
    expect(two.streams).toHaveLength(0);
    one.end();
    await until(() => two.streams[0]);
    await until(() => live.state.phase === "live" && live.state.base === two.origin);
  });

  it("holds no stream while it is paused", async () => {
    live.watch("/jobs");
    const stream = await until(() => one.streams[0]);
    const closed = new Promise((resolve) => stream.response.on("close", resolve));
    live.pause();
    await closed;
    live.watch("/cluster");
    await new Promise((resolve) => setTimeout(resolve, 200));
    expect(one.streams.length + two.streams.length).toBe(1);
    live.resume();
    expect((await until(() => one.streams[1])).watch).toEqual(["/cluster", "/jobs"]);
  });

  it("leaves a replica that says nothing", async () => {
    live.watch("/jobs");
    await until(() => one.streams[0]);
    await until(() => two.streams[0]);
    expect(one.streams).toHaveLength(1);
  }, 10_000);

  it("resumes events by their id, but not for a component that has none of them yet", async () => {
    live.watch("/events");
    const stream = await until(() => one.streams[0]);
    expect(stream.lastId).toBeUndefined();
    stream.send("/events", { events: [event(7)] }, 7);
    await until(() => cache.getQueryData(["/events"]));
    one.end();
    expect((await until(() => two.streams[0])).lastId).toBe("7");
    live.watch("/jobs/gpt/events");
    expect((await until(() => two.streams[1])).lastId).toBeUndefined();
  });

  it("keeps what the stream brought while an older answer was on its way", async () => {
    live.watch("/jobs");
    const stream = await until(() => one.streams[0]);
    await until(() => live.state.base === one.origin); // the server knows of the stream before the page does
    let answer: (() => void) | undefined;
    one.answers.set("/jobs", () => new Promise((resolve) => { answer = () => resolve([200, { total: 1 }]); }));
    const fetched = live.fetch("/jobs", new AbortController().signal);
    const finish = await until(() => answer);
    stream.send("/jobs", { total: 2 }, 9);
    await until(() => cache.getQueryData(["/jobs"]));
    finish();
    expect(await fetched).toEqual({ total: 2 });
  });

  it("says that no replica answers, and finds one that comes back", async () => {
    live.watch("/jobs");
    await until(() => one.streams[0]);
    two.end();
    one.end();
    await until(() => live.state.phase === "lost");
    const port = Number(new URL(one.origin).port);
    const again = createServer((_request, response) => void response.writeHead(200).write(": begin\n\n"));
    await new Promise<void>((resolve) => again.listen(port, "127.0.0.1", resolve));
    await until(() => live.state.phase === "live");
    again.closeAllConnections();
    again.close();
  }, 15_000);

  it("lets who looks anonymously sign in, take that back, and sign out", async () => {
    serve(one);
    one.answers.set("/jobs", () => [200, { total: 1 }]);
    live.watch("/jobs");
    const first = await until(() => one.streams[0]);
    expect(first.token).toBeUndefined();
    first.send("/jobs", { total: 1 }, 7);
    await until(() => cache.getQueryData(["/jobs"]));
    live.askForToken();
    await until(() => live.state.phase === "unauthorized" && first.response.destroyed);
    expect(live.state.anonymous, "the page works without").toBe(true);

    live.authorize();
    expect((await until(() => one.streams[1])).token).toBeUndefined();
    live.askForToken();
    kept.set("strata.token", "sesame");
    live.authorize();
    const known = await until(() => one.streams[2]);
    expect([known.token, known.lastId]).toEqual(["Bearer sesame", undefined]);
    await until(() => live.state.phase === "live");
    known.send("/jobs", { total: 9 }, 8);
    await until(() => (cache.getQueryData(["/jobs"]) as { total: number } | undefined)?.total === 9);

    live.signOut();
    expect(cache.getQueryData(["/jobs"]), "what the other caller was shown").toBeUndefined();
    expect((await until(() => one.streams[3])).token).toBeUndefined();
    expect(kept.has("strata.token")).toBe(false);
  });

  it("takes a token to no other port of the viewer's own host, and is not refused for want of it", async () => {
    kept.set("strata.token", "sesame");
    serve(one);
    live.watch("/jobs");
    expect((await until(() => one.streams[0])).token).toBe("Bearer sesame");
    one.end();
    expect((await until(() => two.streams[0])).token).toBeUndefined();
    two.asks = true;
    two.streams[0]?.response.end();
    await until(() => live.state.phase === "lost");
    expect(kept.get("strata.token")).toBe("sesame");
    expect(authorization("http://r2"), "from a loopback page").toEqual({});
    vi.stubGlobal("location", { origin: "http://r1" });
    expect([authorization("http://r2"), authorization("")]).toEqual(Array(2).fill({ Authorization: "Bearer sesame" }));
    for (const own of ["http://localhost:1", "http://a.localhost", "http://127.1.2.3", "http://0.0.0.0:1", "http://[::1]:1"]) expect(authorization(own), own).toEqual({});
  });

  it("goes on without a token that was revoked, after a reload as well, where nobody else may ask", async () => {
    kept.set("strata.token", "revoked");
    serve(one);
    live.watch("/jobs");
    await until(() => live.state.phase === "unauthorized");
    expect([live.state.anonymous, live.state.problem?.error]).toEqual([true, "who are you?"]);
    live.authorize();
    await until(() => live.state.phase === "live");
    one.asks = true;
    one.streams[0]?.response.end();
    await until(() => live.state.phase === "unauthorized");
    expect([live.state.anonymous, live.state.problem], "this one asks").toEqual([false, null]);
  });
});
