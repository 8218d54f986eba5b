import { useEffect, useRef } from "react";
import uPlot from "uplot";

export interface Line {
  readonly name: string;
  readonly values: readonly (number | null)[];
  /** A CSS variable, `--accent`. */
  readonly color: string;
}

export interface LineChartProps {
  readonly label: string;
  readonly fromUnixMs: number;
  readonly intervalMs: number;
  readonly lines: readonly Line[];
  readonly format: (value: number) => string;
  readonly height: number;
  readonly theme: string;
  /** Called with the index under the pointer, or null. */
  readonly onPoint: (index: number | null) => void;
}

const AXIS_FONT = '11px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif';

export default function LineChart(props: LineChartProps) {
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const newest = useRef(props);
  newest.current = props;
  const names = props.lines.map((line) => `${line.name}${line.color}`).join("|");

  useEffect(() => {
    const element = holder.current;
    if (element === null) return undefined;
    const made = new uPlot(options(newest.current, element.clientWidth, (index) => newest.current.onPoint(index)), dataOf(newest.current), element);
    plot.current = made;
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0 && element.clientWidth !== made.width) made.setSize({ width: element.clientWidth, height: newest.current.height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [names, props.theme, props.height]);

  useEffect(() => {
    plot.current?.setData(dataOf(props));
  }, [props.lines, props.fromUnixMs]);

  return <div ref={holder} role="img" aria-label={props.label} style={{ height: props.height }} />;
}

function dataOf({ fromUnixMs, intervalMs, lines }: LineChartProps): uPlot.AlignedData {
  const length = lines[0]?.values.length ?? 0;
  const times = Array.from({ length }, (_, i) => (fromUnixMs + i * intervalMs) / 1000);
  return [times, ...lines.map((line) => line.values as (number | null)[])];
}

function options(props: LineChartProps, width: number, onPoint: (index: number | null) => void): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const color = (name: string) => style.getPropertyValue(name).trim();
  const axis: uPlot.Axis = {
    stroke: color("--soft"), font: AXIS_FONT, grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, gap: 6,
  };
  return {
    width,
    height: props.height,
    padding: [8, 8, 0, 0],
    cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 5 } },
    legend: { show: false },
    scales: { y: { range: (_plot, low, high) => range(low, high) } },
    axes: [
      { ...axis, size: 22, space: 70, grid: { show: false }, values: (_plot, at) => at.map(hours) },
      { ...axis, size: 52, space: 32, values: (_plot, at) => at.map((value) => props.format(value)) },
    ],
    series: [{}, ...props.lines.map((line): uPlot.Series => ({
      label: line.name, stroke: color(line.color), width: 1.5, points: { show: sparse(line.values), size: 4, fill: color(line.color), stroke: color(line.color) }, spanGaps: false,
    }))],
    hooks: { setCursor: [(made) => onPoint(made.cursor.left === undefined || made.cursor.left < 0 ? null : (made.cursor.idx ?? null))] },
  };
}

/** Values with gaps on both sides would not be seen without a point. */
function sparse(values: readonly (number | null)[]): boolean {
  return values.filter((value) => value !== null).length < values.length / 4;
}

/** A line that hardly moves should look so: the scale spans at least a tenth of its values. */
function range(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const least = Math.max(Math.abs(high) * 0.1, 1e-9);
  const pad = Math.max((high - low) * 0.12, (least - (high - low)) / 2);
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

function hours(seconds: number): string {
  const at = new Date(seconds * 1000);
  const two = (value: number) => String(value).padStart(2, "0");
  const text = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return seconds % 60 === 0 ? text : `${text}:${two(at.getSeconds())}`;
}
