/**
 * The one stream of this page.
 *
 * 1. Components declare the paths they watch; the paths of all mounted components are one stream.
 * 2. A change is written into the query cache, where components find it. GET brings a path's first data, or
 *    the error: the stream has no answer for a job that does not exist.
 * 3. A replica sends something every second. If its stream breaks, or it is silent for SILENCE_MS, the stream goes on at
 *    the next replica of `order`; requests follow it there.
 * 4. An id resumes `events` only. It is sent if the stream it comes from had all of the `events` paths.
 */
import type { QueryClient } from "@tanstack/react-query";
import { ApiError, address, authorization, get, problemOf, withholdsToken } from "../api/client";
import { session } from "../api/session";
import type { Cluster, Problem } from "../api/types";
import { kindOf, merge } from "./append";
import { bases, isLoopback, order, pauseMs } from "./replicas";
import { SseParser } from "./sse";

const SILENCE_MS = 3000;
const CONNECT_MS = 1200;
const REOPEN_MS = 60;
const LONG_TEXT = 50_000;

export type Phase = "connecting" | "live" | "lost" | "unauthorized";

export interface LiveState {
  readonly phase: Phase;
  readonly base: string;
  readonly problem: Problem | null;
  /** A replica serves this page without a token, or may do so: signing in is optional, and can be undone. */
  readonly anonymous: boolean;
}

type Outcome = "ended" | "silent" | "unreachable" | "reopen";

export class Live {
  readonly #cache: QueryClient;
  readonly #origin: string;
  readonly #watched = new Map<string, number>();
  readonly #writes = new Map<string, number>();
  readonly #listeners = new Set<() => void>();
  #state: LiveState = { phase: "connecting", base: "", problem: null, anonymous: false };
  #known: string[];
  #abort: AbortController | null = null;
  #reopen: ReturnType<typeof setTimeout> | undefined;
  #wake: (() => void) | null = null;
  #lastId = "";
  #idCovers: ReadonlySet<string> = new Set();
  #stopped = false;
  #paused = false;
  /** When something of the stream arrived last, by performance.now(). */
  heardAt: number | null = null;

  constructor(cache: QueryClient, origin: string) {
    this.#cache = cache;
    this.#origin = origin;
    this.#known = session.replicas().map((url) => (url === origin ? "" : url));
  }

  get state(): LiveState {
    return this.#state;
  }

  subscribe = (listener: () => void): (() => void) => {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  };

  /** Have `path` in the stream until the returned function is called. */
  watch(path: string): () => void {
    this.#watched.set(path, (this.#watched.get(path) ?? 0) + 1);
    if (this.#watched.get(path) === 1) this.#changePaths();
    return () => {
      const left = (this.#watched.get(path) ?? 1) - 1;
      if (left > 0) this.#watched.set(path, left);
      else if (this.#watched.delete(path)) this.#changePaths();
    };
  }

  /** Return the present data of `path`. Data that the stream brought meanwhile is newer than the answer. */
  async fetch(path: string, signal: AbortSignal): Promise<unknown> {
    const writes = this.#writes.get(path);
    const { base } = this.#state;
    try {
      const body = await get<unknown>(base, path, signal);
      const now = this.#cache.getQueryData([path]);
      if (kindOf(path) === "whole" && this.#writes.get(path) !== writes) return now;
      if (path === "/cluster") this.#learn(body as Cluster);
      return kindOf(path) === "whole" ? body : merge(path, body, now ?? body);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401 && !withholdsToken(base)) this.#refuse(error.message);
      throw error;
    }
  }

  /** Go on with the token that the session has now, or without one. Data shown to another caller is dropped. */
  authorize(): void {
    this.#lastId = "";
    this.#set({ phase: "connecting", problem: null });
    this.#abort?.abort("reopen");
    void this.#cache.resetQueries();
    this.#wake?.();
  }

  /** Show the form for a token, though no replica refused the caller. */
  askForToken(): void {
    this.#set({ phase: "unauthorized", problem: null });
    this.#abort?.abort("reopen");
  }

  /** Forget the token, and go on without one. */
  signOut(): void {
    session.forgetToken();
    this.authorize();
  }

  /** Hold no stream until `resume`: a browser has six connections to an origin for all of its tabs. */
  pause(): void {
    this.#paused = true;
    this.#abort?.abort("reopen");
  }

  resume(): void {
    if (!this.#paused) return;
    this.#paused = false;
    this.#wake?.();
  }

  stop(): void {
    this.#stopped = true;
    this.#abort?.abort("reopen");
    this.#wake?.();
  }

  /** Keep a stream open until `stop`. */
  async run(): Promise<void> {
    let candidates = [this.#state.base];
    let failed = 0;
    while (!this.#stopped) {
      if (this.#paused || this.#watched.size === 0 || this.#state.phase === "unauthorized") {
        await this.#sleep(null);
        continue;
      }
      const base = candidates.shift();
      if (base === undefined) {
        this.#set({ phase: "lost" });
        await this.#sleep(pauseMs(failed++));
        candidates = order(this.#state.base, this.#known, false);
        continue;
      }
      const opened = this.heardAt;
      const outcome = await this.#stream(base);
      if (this.heardAt !== opened) failed = 0;
      if (outcome === "reopen") candidates = [this.#state.base];
      else if (outcome !== "unreachable") candidates = order(this.#state.base, this.#known, outcome === "silent");
      else if (candidates.length === 0 && failed === 0) {
        // the first base of a page's life was tried alone
        candidates = order(base, this.#known, true).slice(0, -1);
        failed = 1;
      }
      if (outcome !== "reopen" && this.#state.phase === "live") this.#set({ phase: "connecting" });
    }
  }

  async #stream(base: string): Promise<Outcome> {
    const abort = new AbortController();
    this.#abort = abort;
    let timer = setTimeout(() => abort.abort("unreachable"), CONNECT_MS);
    const anonymous = session.token() === "";
    try {
      const paths = [...this.#watched.keys()].sort();
      const response = await fetch(this.#url(base, paths), {
        headers: { Accept: "text/event-stream", ...authorization(base), ...this.#resume(paths) },
        credentials: "omit",
        cache: "no-store",
        signal: abort.signal,
      });
      if (response.status === 401 && !withholdsToken(base)) {
        const { error } = await problemOf(response);
        if (!abort.signal.aborted) this.#refuse(error); // else the next GET fails with the replica's own text
        return "reopen";
      }
      if (!response.ok || response.body === null) {
        this.#set({ problem: await problemOf(response) });
        return "unreachable";
      }
      this.#set({ base, anonymous: anonymous || this.#state.anonymous });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const parser = new SseParser();
      for (;;) {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort("silent"), SILENCE_MS);
        const { done, value } = await reader.read();
        if (done) return "ended";
        this.heardAt = performance.now();
        if (this.#state.phase !== "live") this.#set({ phase: "live", problem: null });
        for (const each of parser.push(value)) {
          if (abort.signal.aborted) break;
          if (each.id) this.#remember(each.id, paths);
          if (each.event === "change") await this.#write(each.data);
        }
      }
    } catch {
      if (this.#stopped) return "reopen";
      return abort.signal.aborted ? (abort.signal.reason as Outcome) : this.#state.phase === "live" ? "ended" : "unreachable";
    } finally {
      clearTimeout(timer);
      abort.abort("reopen");
    }
  }

  #url(base: string, paths: readonly string[]): string {
    return address(base, `/stream?${paths.map((path) => `watch=${encodeURIComponent(path)}`).join("&")}`);
  }

  #resume(paths: readonly string[]): Record<string, string> {
    const covered = paths.every((path) => kindOf(path) !== "events" || this.#idCovers.has(path));
    return this.#lastId && covered ? { "Last-Event-ID": this.#lastId } : {};
  }

  #remember(id: string, paths: readonly string[]): void {
    this.#lastId = id;
    this.#idCovers = new Set(paths);
  }

  async #write(data: string): Promise<void> {
    const { path, body } = JSON.parse(data) as { path: string; body: unknown };
    if (body === null || (typeof body === "object" && "error" in body)) {
      // the resource was removed: GET returns the error
      void this.#cache.invalidateQueries({ queryKey: [path] });
      return;
    }
    this.#writes.set(path, (this.#writes.get(path) ?? 0) + 1);
    this.#cache.setQueryData([path], (before: unknown) => merge(path, before, body));
    if (path === "/cluster") this.#learn(body as Cluster);
    // a large body is a task of its own, and so is the drawing of it
    if (data.length > LONG_TEXT) await new Promise((resolve) => setTimeout(resolve));
  }

  #learn(cluster: Cluster): void {
    this.#known = bases(cluster, this.#origin);
    session.keepReplicas(cluster.replicas.map((each) => each.http_url).filter((url) => url !== ""));
  }

  #refuse(error: string): void {
    if (this.#state.phase === "unauthorized") return;
    // without a token nothing was refused yet; with one it is unknown whether the cluster serves callers without
    const refused = session.token() !== "";
    session.forgetToken();
    this.#set({
      phase: "unauthorized",
      problem: refused ? { error, hint: "" } : null,
      anonymous: refused && (this.#state.anonymous || isLoopback(this.#origin)),
    });
    this.#abort?.abort("reopen");
  }

  #changePaths(): void {
    clearTimeout(this.#reopen);
    this.#reopen = setTimeout(() => {
      this.#abort?.abort("reopen");
      this.#wake?.();
    }, REOPEN_MS);
  }

  #sleep(ms: number | null): Promise<void> {
    return new Promise((resolve) => {
      const timer = ms === null ? undefined : setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  #set(change: Partial<LiveState>): void {
    const next = { ...this.#state, ...change };
    if (Object.entries(next).every(([name, value]) => this.#state[name as keyof LiveState] === value)) return;
    this.#state = next;
    for (const listener of this.#listeners) listener();
  }
}
