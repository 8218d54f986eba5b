/** A chart's content in numbers: its text alternative. */

export interface Extent {
  readonly last: number | null;
  readonly low: number | null;
  readonly high: number | null;
}

export function extent(values: readonly (number | null)[]): Extent {
  let last: number | null = null;
  let low: number | null = null;
  let high: number | null = null;
  for (const value of values) {
    if (value === null) continue;
    last = value;
    if (low === null || value < low) low = value;
    if (high === null || value > high) high = value;
  }
  return { last, low, high };
}

export function sentence(name: string, values: readonly (number | null)[], format: (value: number) => string): string {
  const { last, low, high } = extent(values);
  if (last === null || low === null || high === null) return `${name}: nothing was reported`;
  return `${name}: ${format(last)} last, between ${format(low)} and ${format(high)}`;
}
