import { NONE } from "../../format/format";

/**
 * A score of a rank, 0 to 1: 1 is as fast as the rank that it is compared to. It does not decide which rank is slow, but
 * stands out if a finding does. Its bar is a background: a table has thousands.
 */
export function Score({ value, slow }: { value: number | null; slow: boolean }) {
  if (value === null) return <>{NONE}</>;
  return <span className={slow ? "score warn" : "score"} style={{ ["--score" as string]: `${Math.min(1, value) * 2.5}rem` }}>{value.toFixed(2)}</span>;
}
