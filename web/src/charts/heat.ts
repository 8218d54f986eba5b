/** The numbers behind the heat map: each value against the median of all. It does not judge ranks: findings do. */
import type { Heatmap } from "../api/types";

/** Return the median of the reported values, or of at most `most` of them; 0 if there are none. */
export function median(columns: Heatmap["columns"], most = 4000): number {
  const total = columns.reduce((sum, column) => sum + column.length, 0);
  const stride = Math.max(1, Math.floor(total / most));
  const values: number[] = [];
  let seen = 0;
  for (const column of columns) {
    for (const value of column) {
      if (value !== null && seen % stride === 0) values.push(value);
      seen++;
    }
  }
  values.sort((a, b) => a - b);
  return values[values.length >> 1] ?? 0;
}

/** Steps vary: a value within a tenth of the median is not hot at all. */
export const COOL = 1.1;
export const HOT = 1.7;

/** How hot a value is, from 0 (COOL times the median or faster) to 1 (HOT times or slower). */
export function heat(value: number, middle: number): number {
  return middle > 0 ? Math.min(1, Math.max(0, (value / middle - COOL) / (HOT - COOL))) : 0;
}

/**
 * Return one byte of heat for each cell of a picture of `rows` by columns, row by row; 0 means no report.
 *
 * If ranks outnumber rows, a row shows its slowest rank: a single slow one of a thousand stays in sight.
 */
export function cells(map: Heatmap, rows: number, middle: number): Uint8Array {
  const width = map.columns.length;
  const found = new Uint8Array(rows * width);
  map.columns.forEach((column, x) => {
    for (let rank = 0; rank < column.length; rank++) {
      const value = column[rank];
      if (value === null || value === undefined) continue;
      const at = Math.floor((rank * rows) / map.ranks) * width + x;
      const byte = 1 + Math.round(254 * heat(value, middle));
      if (byte > (found[at] ?? 0)) found[at] = byte;
    }
  });
  return found;
}

/** Return the ranks with the longest times on average, with their factor of the median, the longest first. */
export function longest(map: Heatmap, middle: number, most = 3): { rank: number; factor: number }[] {
  const found: { rank: number; factor: number }[] = [];
  for (let rank = 0; rank < map.ranks; rank++) {
    let sum = 0;
    let count = 0;
    for (const column of map.columns) {
      const value = column[rank];
      if (value === null || value === undefined) continue;
      sum += value;
      count++;
    }
    if (count > 0 && middle > 0) found.push({ rank, factor: sum / count / middle });
  }
  return found.sort((a, b) => b.factor - a.factor || a.rank - b.rank).slice(0, most);
}
