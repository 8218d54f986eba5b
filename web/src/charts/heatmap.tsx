import { useEffect, useMemo, useRef, useState, type PointerEvent } from "react";
import type { Heatmap as HeatmapData } from "../api/types";
import { clock, duration, significant } from "../format/format";
import { useTheme } from "../ui/theme";
import { cells, COOL, HOT, longest, median } from "./heat";

const RAMP = {
  light: [[0xdc, 0xe6, 0xf2], [0xf0, 0xb4, 0x54], [0xb3, 0x20, 0x2c]],
  dark: [[0x20, 0x2b, 0x3a], [0xb5, 0x7d, 0x1c], [0xff, 0x8a, 0x86]],
} as const;

/** Compute time by rank and time. Its text alternative names the ranks with the longest times; the table below has every number. */
export default function Heatmap({ map, onRank }: { map: HeatmapData; onRank: (rank: number) => void }) {
  const theme = useTheme();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [at, setAt] = useState<{ rank: number; column: number } | null>(null);
  const middle = useMemo(() => median(map.columns), [map]);
  const top = useMemo(() => longest(map, middle), [map, middle]);
  const height = Math.min(240, Math.max(96, map.ranks * 12));
  const rows = Math.min(map.ranks, height);

  useEffect(() => {
    if (canvas.current) paint(canvas.current, cells(map, rows, middle), rows, map.columns.length, RAMP[theme]);
  }, [map, rows, middle, theme]);

  const under = (event: PointerEvent<HTMLCanvasElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = (part: number, whole: number, of: number) => Math.min(of - 1, Math.max(0, Math.floor((part / whole) * of)));
    return {
      rank: share(event.clientY - box.top, box.height, map.ranks),
      column: share(event.clientX - box.left, box.width, map.columns.length),
    };
  };
  const first = clock(map.from_unix_ms);
  const last = clock(map.from_unix_ms + map.columns.length * map.interval_ms);
  const words = top.length === 0
    ? "No compute time is known."
    : `Longest on average: ${top.map(({ rank, factor }) => `rank ${rank} (${factor.toFixed(2)} × the median)`).join(", ")}.`;

  return (
    <figure>
      <div className="flex gap-2">
        <div aria-hidden="true" className="flex flex-col justify-between text-right text-[11px] text-soft">
          <span>0</span>
          <span>rank</span>
          <span>{map.ranks - 1}</span>
        </div>
        <canvas
          ref={canvas} role="img" aria-label={`Compute time of ${map.ranks} ranks from ${first} to ${last}. ${words}`}
          className="w-full min-w-0 cursor-crosshair rounded-[3px] [image-rendering:pixelated]" style={{ height }}
          onPointerMove={(event) => setAt(under(event))} onPointerLeave={() => setAt(null)}
          onClick={(event) => onRank(under(event as unknown as PointerEvent<HTMLCanvasElement>).rank)}
        />
      </div>
      <figcaption className="mt-1 flex flex-wrap items-baseline justify-between gap-x-4 text-[12px] text-soft">
        <span>{at === null ? words : reading(map, at, middle)}</span>
        <span className="inline-flex flex-wrap items-center gap-x-1.5">
          {first} to {last} · median of all {duration(middle / 1000)}
          <span aria-hidden="true" className="ml-2 inline-block h-2 w-16 rounded-[2px]" style={{ background: `linear-gradient(90deg, ${RAMP[theme].map((c) => `rgb(${c.join(" ")})`).join(",")})` }} />
          <span className="whitespace-nowrap">{COOL} × to {HOT} ×</span>
        </span>
      </figcaption>
    </figure>
  );
}

function reading(map: HeatmapData, { rank, column }: { rank: number; column: number }, middle: number): string {
  const value = map.columns[column]?.[rank];
  const time = clock(map.from_unix_ms + column * map.interval_ms);
  if (value === null || value === undefined) return `Rank ${rank} at ${time}: nothing was reported`;
  return `Rank ${rank} at ${time}: ${duration(value / 1000)}, ${significant(value / middle)} × the median`;
}

function paint(canvas: HTMLCanvasElement, heats: Uint8Array, rows: number, columns: number, ramp: (typeof RAMP)["light" | "dark"]): void {
  canvas.width = Math.max(1, columns);
  canvas.height = Math.max(1, rows);
  const context = canvas.getContext("2d");
  if (context === null) return;
  const image = context.createImageData(canvas.width, canvas.height);
  heats.forEach((byte, i) => {
    if (byte === 0) return;
    const along = ((byte - 1) / 254) * 2;
    const from = ramp[along < 1 ? 0 : 1];
    const to = ramp[along < 1 ? 1 : 2];
    const part = along < 1 ? along : along - 1;
    for (let c = 0; c < 3; c++) image.data[i * 4 + c] = (from[c] ?? 0) + ((to[c] ?? 0) - (from[c] ?? 0)) * part;
    image.data[i * 4 + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}
