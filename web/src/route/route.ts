/** The address of the page, as state. */
import { useSyncExternalStore } from "react";

export interface Route {
  readonly parts: readonly string[];
  readonly query: URLSearchParams;
  readonly path: string;
}

const listeners = new Set<() => void>();
let current = read();

function read(): Route {
  const { pathname, search } = window.location;
  const parts = pathname.split("/").filter((part) => part !== "").map(decode);
  return { parts, query: new URLSearchParams(search), path: pathname };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function changed(): void {
  current = read();
  for (const listener of listeners) listener();
}

window.addEventListener("popstate", changed);

export function useRoute(): Route {
  return useSyncExternalStore(
    (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    () => current,
  );
}

/** Go to `to`; another path begins at its top, another query stays where it is. */
export function navigate(to: string, options: { replace?: boolean } = {}): void {
  const before = window.location.pathname;
  window.history[options.replace ? "replaceState" : "pushState"](null, "", to);
  changed();
  if (window.location.pathname !== before) {
    window.scrollTo(0, 0);
    // a reader of the screen begins with the new page
    requestAnimationFrame(() => document.getElementById("main")?.focus({ preventScroll: true }));
  }
}

/** Set or remove one parameter of the query. */
export function setQuery(name: string, value: string | null, options: { replace?: boolean } = { replace: true }): void {
  const query = new URLSearchParams(window.location.search);
  if (value === null || value === "") query.delete(name);
  else query.set(name, value);
  const text = query.toString();
  navigate(window.location.pathname + (text ? `?${text}` : ""), options);
}

export function jobPath(job: string, page = ""): string {
  return `/jobs/${encodeURIComponent(job)}${page && `/${page}`}`;
}
