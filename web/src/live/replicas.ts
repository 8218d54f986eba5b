/** Which replica to try next. Bases are origins; "" is the one that served the page. */
import type { Cluster } from "../api/types";

/**
 * Return the bases to try, in order, after the stream from `current` broke.
 *
 * A broken connection is tried again at once at the same replica: a replica may end a stream at any time. A silent replica
 * comes last: it accepted the connection and says nothing. The others follow in the order after `current`, so
 * that the pages of a lost replica do not all connect to the same other one.
 */
export function order(current: string, known: readonly string[], silent: boolean): string[] {
  const all = known.includes(current) ? known : [current, ...known];
  const at = all.indexOf(current);
  const others = [...all.slice(at + 1), ...all.slice(0, at)];
  return silent ? [...others, current] : [current, ...others];
}

/** Return the bases of a cluster's replicas, with the page's own origin as "". */
export function bases(cluster: Pick<Cluster, "replicas">, origin: string): string[] {
  const urls = cluster.replicas.map((each) => each.http_url.replace(/\/+$/, "")).filter((url) => url !== "");
  return [...new Set(urls.map((url) => (url === origin ? "" : url)))];
}

/** Tell whether a URL's host is the one that the browser runs on. */
export function isLoopback(url: string): boolean {
  const { hostname } = new URL(url);
  return /^(127\.|0\.0\.0\.0$|\[::1?\]$|(.+\.)?localhost\.?$)/.test(hostname);
}

/** Return how long to wait before the round `failed` (0: the first after all replicas were tried once). */
export function pauseMs(failed: number): number {
  return Math.min(5000, 250 * 2 ** failed);
}
