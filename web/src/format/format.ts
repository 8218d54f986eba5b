/** Numbers, sizes and times as people read them. `–` stands for a value that was not reported. */

export const NONE = "–";

type Maybe = number | null | undefined;

/** `1 234`, `12.3 k`, `4.56 M`: at most four significant digits. */
export function count(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return Math.round(value).toLocaleString("en-US");
}

export function compact(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e12) return `${significant(value / 1e12)} T`;
  if (size >= 1e9) return `${significant(value / 1e9)} G`;
  if (size >= 1e6) return `${significant(value / 1e6)} M`;
  if (size >= 1e4) return `${significant(value / 1e3)} k`;
  return significant(value);
}

/** Three significant digits; tiny and huge values in scientific notation. */
export function significant(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2);
  // 0.9999 has as many digits as the 1.00 that it is rounded to
  const digits = 2 - Math.floor(Math.log10(Number(size.toPrecision(3))));
  return value.toFixed(Math.max(0, Math.min(digits, 5)));
}

export function bytes(value: Maybe): string {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let size = value;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit++;
  }
  return `${unit === 0 ? size.toFixed(0) : significant(size)}\u00a0${units[unit]}`;
}

export function percent(ratio: Maybe, digits = 1): string {
  return ratio === null || ratio === undefined ? NONE : `${(100 * ratio).toFixed(digits)}\u00a0%`;
}

/** A length of time in its two largest units: `3 d 4 h`, `12 min 5 s`, `1.24 s`, `310 ms`. */
export function duration(ms: Maybe): string {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return NONE;
  if (ms < 0) return `−${duration(-ms)}`;
  if (ms < 1) return ms === 0 ? "0 s" : `${Math.max(1, Math.round(ms * 1000))} µs`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(2)} s`;
  const s = Math.round(ms / 1000);
  if (s < 60) return `${(ms / 1000).toFixed(1)} s`;
  const parts: [number, string][] = [
    [Math.floor(s / 86_400), "d"],
    [Math.floor(s / 3600) % 24, "h"],
    [Math.floor(s / 60) % 60, "min"],
    [s % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

/** How long ago, coarse, so that a changing age does not flicker. */
export function age(ms: Maybe): string {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 1000) return "< 1 s";
  if (ms < 60_000) return `${Math.floor(ms / 1000)} s`;
  return duration(Math.floor(ms / 60_000) * 60_000);
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** The time of day; with its date if that is not today. */
export function clock(unixMs: number, nowMs: number = Date.now()): string {
  const at = new Date(unixMs);
  const today = at.toDateString() === new Date(nowMs).toDateString();
  return today ? CLOCK.format(at) : `${DAY.format(at)} ${CLOCK.format(at).slice(0, 5)}`;
}

export function iso(unixMs: number): string {
  return new Date(unixMs).toISOString();
}

export function plural(amount: number, one: string, many = `${one}s`): string {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}
