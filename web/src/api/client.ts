/** Requests to the replica that answers at present, with the caller's token. */
import type { Action, Checkpoint, CheckpointAction, Problem } from "./types";
import { isLoopback } from "../live/replicas";
import { session } from "./session";

const TIMEOUT_MS = 5000;

/** A replica's refusal: `message` states the error, `hint` the remedy. Status 0: no replica answered. */
export class ApiError extends Error {
  readonly status: number;
  readonly hint: string;

  constructor(status: number, problem: Problem) {
    super(problem.error);
    this.status = status;
    this.hint = problem.hint;
  }
}

/** Return the answer to GET of `path` at the replica `base` ("" for the one that served the page). */
export async function get<T>(base: string, path: string, signal?: AbortSignal): Promise<T> {
  return (await request(base, path, { signal })) as T;
}

/** Request an operator's action; return the checkpoint after it, or null if its record is deleted. */
export async function act(
  base: string, job: string, step: number, action: Action, body: Partial<CheckpointAction>,
): Promise<Checkpoint | null> {
  const path = `/jobs/${encodeURIComponent(job)}/checkpoints/${step}/${action}`;
  const headers = { "Content-Type": "application/json", "X-Strata-Action": "1" };
  return (await request(base, path, { method: "POST", headers, body: JSON.stringify(body) })) as Checkpoint | null;
}

/** The address of a path of the API, and the headers that each request carries. */
export function address(base: string, path: string): string {
  return `${base}/api/v1${path}`;
}

/** The header with the caller's token, for the replica `base`. */
export function authorization(base: string): Record<string, string> {
  const token = session.token();
  return token && !withholdsToken(base) ? { Authorization: `Bearer ${token}` } : {};
}

/**
 * Whether the replica `base` is sent no token, though there is one.
 *
 * A loopback address is the viewer's own host. If the page came through a tunnel, another program may listen at the
 * address by which the cluster knows another replica.
 */
export function withholdsToken(base: string): boolean {
  return base !== "" && session.token() !== "" && (isLoopback(location.origin) || isLoopback(base));
}

async function request(base: string, path: string, init: RequestInit): Promise<unknown> {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const signal = init.signal ? AbortSignal.any([init.signal, limit]) : limit;
  let response: Response | undefined;
  try {
    response = await fetch(address(base, path), {
      ...init,
      signal,
      credentials: "omit",
      headers: { Accept: "application/json", ...authorization(base), ...init.headers },
    });
    if (response.ok) return await response.json();
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, { error: response ? "The replica's answer broke off" : "The replica does not answer", hint: "" });
  }
  const problem = await problemOf(response);
  init.signal?.throwIfAborted();
  throw new ApiError(response.status, problem);
}

/** Return the replica's own texts; a proxy in between may have sent another answer. */
export async function problemOf(response: Response): Promise<Problem> {
  try {
    const body = (await response.json()) as Partial<Problem>;
    if (typeof body.error === "string") return { error: body.error, hint: body.hint ?? "" };
  } catch {
    // not JSON: below
  }
  return { error: `The replica answered ${response.status} ${response.statusText}`.trim(), hint: "" };
}
