import { lazy, Suspense, useState } from "react";
import type { History } from "../api/types";
import { parts } from "../parts";
import { NONE } from "../format/format";
import { useTheme } from "../ui/theme";
import { extent, sentence } from "./summary";

// the library of the charts is fetched once a page has one
const LineChart = lazy(parts.lineChart);

export interface ChartLine {
  /** Name in the history. */
  readonly series: string;
  readonly name: string;
  readonly color: string;
}

/** One quantity over time: its newest value, or that under the pointer, and its lowest and highest, beside the line. */
export function Chart({ title, history, lines, format, height = 120 }: {
  title: string; history: History; lines: readonly ChartLine[]; format: (value: number) => string; height?: number;
}) {
  const theme = useTheme();
  const [point, setPoint] = useState<number | null>(null);
  const shown = lines
    .map((line) => ({ ...line, values: history.series[line.series]?.values ?? [] }))
    .filter((line) => line.values.some((value) => value !== null));
  const label = shown.map((line) => sentence(lines.length > 1 ? `${title}, ${line.name}` : title, line.values, format)).join(". ");
  return (
    <figure className="min-w-0 rounded-md border border-line px-3 pt-2 pb-1">
      <figcaption className="mb-0.5">
        <span className="flex flex-wrap items-baseline gap-x-2">
          <span className="font-medium">{title}</span>
          {lines.length === 1 && shown[0] && <Range values={shown[0].values} format={format} />}
        </span>
        <span className="flex flex-wrap gap-x-3 text-[12px]">
          {shown.map((line) => {
            const value = point === null ? extent(line.values).last : line.values[point];
            return (
              <span key={line.series} className="inline-flex items-center gap-1.5">
                <span aria-hidden="true" className="inline-block h-[2px] w-3" style={{ background: `var(${line.color})` }} />
                {lines.length > 1 && <span className="text-soft">{line.name}</span>}
                <span className="font-medium">{value === null || value === undefined ? NONE : format(value)}</span>
              </span>
            );
          })}
        </span>
      </figcaption>
      <div style={{ height }}>
        {shown.length === 0 ? (
          <p className="pt-8 text-center text-soft">Nothing was reported in this time.</p>
        ) : (
          <Suspense>
            <LineChart label={label} fromUnixMs={history.from_unix_ms} intervalMs={history.interval_ms} lines={shown}
              format={format} height={height} theme={theme} onPoint={setPoint} />
          </Suspense>
        )}
      </div>
    </figure>
  );
}

function Range({ values, format }: { values: readonly (number | null)[]; format: (value: number) => string }) {
  const { low, high } = extent(values);
  if (low === null || high === null) return null;
  return <span className="text-[12px] text-soft">{format(low)} to {format(high)}</span>;
}
