import { NONE } from "../../format/format";

/**
 * A score of a rank, 0 to 1: 1 is as fast as it can be compared to. It says nothing of who is slow, but where a finding
 * does, it stands out. Its bar is a background: a table has thousands.
 */
export function Score({ value, slow }: { value: number | null; slow: boolean }) {
  if (value === null) return <>{NONE}</>;
  return <span className={slow ? "score warn" : "score"} style={{ ["--score" as string]: `${Math.min(1, value) * 2.5}rem` }}>{value.toFixed(2)}</span>;
}
