/** Return the smallest and largest share of a member; even: they differ by a quarter of the larger, or one shard, at most. */
export function balance(owned: Readonly<Record<string, number>>): { low: number; high: number; even: boolean } {
  const counts = Object.values(owned);
  if (counts.length === 0) return { low: 0, high: 0, even: true };
  const low = Math.min(...counts);
  const high = Math.max(...counts);
  return { low, high, even: high - low <= Math.max(1, high / 4) };
}
