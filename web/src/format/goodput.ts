/** The ledger of a job's wall time. */
import type { Goodput } from "../api/types";

export interface LedgerPart {
  readonly cause: string;
  readonly seconds: number;
  readonly ratio: number;
  readonly useful: boolean;
}

const WORDS: Readonly<Record<string, string>> = {
  step: "useful steps",
  lost: "lost: trained again",
  start: "start to first step",
  save: "saving",
  restore: "restoring",
  eval: "evaluation",
  compile: "compiling",
  barrier: "waiting at barriers",
  unaccounted: "not accounted for",
};

export function causeWords(cause: string): string {
  return WORDS[cause] ?? cause;
}

/**
 * Return the parts of the wall time, which sum to it: time without a known cause is a part of its own.
 *
 * Rounding of the replica (below 0.05 % of the wall time) goes to no part.
 */
export function ledger(goodput: Goodput): LedgerPart[] {
  const wall = goodput.wall_s;
  const known = goodput.parts.reduce((sum, part) => sum + part.seconds, 0);
  const whole = Math.max(wall, known);
  const parts = goodput.parts.map((part) => ({
    cause: part.cause,
    seconds: part.seconds,
    ratio: whole > 0 ? part.seconds / whole : 0,
    useful: part.cause === "step",
  }));
  const rest = wall - known;
  if (rest > wall * 0.0005) {
    parts.push({ cause: "unaccounted", seconds: rest, ratio: rest / whole, useful: false });
  }
  return parts;
}
