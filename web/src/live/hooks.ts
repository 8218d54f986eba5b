/** How components reach the stream. */
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { createContext, use, useEffect, useSyncExternalStore } from "react";
import { ApiError } from "../api/client";
import type { Me } from "../api/types";
import type { Live, LiveState } from "./connection";

export const LiveContext = createContext<Live | null>(null);

export function useLive(): Live {
  const live = use(LiveContext);
  if (live === null) throw new Error("there is no LiveContext above this component");
  return live;
}

export function useLiveState(): LiveState {
  const live = useLive();
  return useSyncExternalStore(live.subscribe, () => live.state);
}

/** The caller's identity. The stream has no such path: the answer depends on the caller, and changes only with the token. */
export function useMe(): Me | undefined {
  return useBody<Me>("/me", false).data;
}

export interface Resource<T> {
  readonly data: T | undefined;
  readonly error: ApiError | null;
}

/**
 * Return the answer to GET of `path`, kept current by the stream while the component is mounted; null watches nothing.
 *
 * With `keep`, the shown data stays until another path has answered: pages of one list.
 */
export function useResource<T>(path: string | null, options: { keep?: boolean } = {}): Resource<T> {
  const live = useLive();
  useEffect(() => (path === null ? undefined : live.watch(path)), [live, path]);
  return useBody(path, options.keep === true);
}

function useBody<T>(path: string | null, keep: boolean): Resource<T> {
  const live = useLive();
  const query = useQuery<T, ApiError>({
    queryKey: [path],
    queryFn: ({ signal }) => live.fetch(path ?? "", signal) as Promise<T>,
    enabled: path !== null,
    retry: (count, error) => (error.status === 0 || error.status >= 500) && count < 30,
    retryDelay: 400,
    placeholderData: keep ? keepPreviousData : undefined,
  });
  return { data: query.data, error: query.error };
}
