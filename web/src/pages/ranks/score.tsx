import { NONE } from "../../format/format";

/** A score of a rank, 0 to 1: 1 is as fast as it can be compared to. Its bar is a background: a table has thousands. */
export function Score({ value }: { value: number | null }) {
  if (value === null) return <>{NONE}</>;
  const tone = value < 0.7 ? "score bad" : value < 0.85 ? "score warn" : "score";
  return <span className={tone} style={{ ["--score" as string]: `${Math.min(1, value) * 2.5}rem` }}>{value.toFixed(2)}</span>;
}
