/** Light or dark: the system's setting, until the reader chooses. */
import { useSyncExternalStore } from "react";

export type Choice = "system" | "light" | "dark";
const KEY = "strata.theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();
let choice: Choice = readChoice();

function readChoice(): Choice {
  const kept = localStorage.getItem(KEY);
  return kept === "light" || kept === "dark" ? kept : "system";
}

function theme(): "light" | "dark" {
  return choice === "system" ? (system.matches ? "dark" : "light") : choice;
}

function apply(): void {
  document.documentElement.dataset.theme = theme();
  for (const listener of listeners) listener();
}

export function chooseTheme(next: Choice): void {
  choice = next;
  if (next === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, next);
  apply();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useTheme(): "light" | "dark" {
  return useSyncExternalStore(subscribe, theme);
}

export function useThemeChoice(): Choice {
  return useSyncExternalStore(subscribe, () => choice);
}

system.addEventListener("change", apply);
apply();
