import { useState } from "react";
import type { History } from "../../api/types";
import { Chart } from "../../charts/chart";
import { duration, percent, plural, significant } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Section } from "../../ui/section";
import { Loaded } from "../../ui/states";

const SPANS = [[1000, "10 min"], [15000, "24 h"]] as const;
const SHOWN_AT_FIRST = 2;

/** Throughput, step time, and the values that the program reported. */
export function JobCharts({ job, reported }: { job: string; reported: Readonly<Record<string, number | null>> }) {
  const [span, setSpan] = useState<number>(1000);
  const [all, setAll] = useState(false);
  const history = useResource<History>(`/jobs/${encodeURIComponent(job)}/history?interval_ms=${span}`, { keep: true });
  // loss first: people look for it
  const names = Object.keys(reported).sort((a, b) => Number(b === "loss") - Number(a === "loss") || a.localeCompare(b));
  const aside = (
    <span role="group" aria-label="Time span" className="inline-flex gap-2">
      {SPANS.map(([interval, name]) => (
        <button key={interval} type="button" aria-pressed={span === interval} onClick={() => setSpan(interval)}
          className="hover:text-ink aria-pressed:font-medium aria-pressed:text-ink aria-pressed:underline aria-pressed:underline-offset-4">
          {name}
        </button>
      ))}
    </span>
  );
  return (
    <Section title="Is it moving?" aside={aside}>
      <Loaded of={history}>
        {(data) => (
          <div className="grid gap-3 sm:grid-cols-2 xl:grid-cols-3">
            <Chart title="Steps per second" history={data} format={significant} lines={[{ series: "steps_per_s", name: "steps/s", color: "--accent" }]} />
            <Chart title="Step time" history={data} format={(s) => duration(s * 1000)} lines={[
              { series: "step_time_p50", name: "median", color: "--accent" },
              { series: "step_time_p90", name: "p90", color: "--cause-1" },
              { series: "step_time_p99", name: "p99", color: "--cause-4" },
            ]} />
            {names.slice(0, all ? undefined : SHOWN_AT_FIRST).map((name) => (
              <Chart key={name} title={reported[name] === null ? `${name}: not a number` : name} history={data} format={significant} lines={[{ series: `reported.${name}`, name, color: "--accent" }]} />
            ))}
            <Chart title="Goodput" history={data} format={(ratio) => percent(ratio)} lines={[{ series: "goodput", name: "goodput", color: "--good" }]} />
            <Chart title="Save and commit" history={data} format={(s) => duration(s * 1000)} lines={[
              { series: "save_s", name: "save", color: "--cause-2" },
              { series: "commit_s", name: "commit", color: "--cause-3" },
            ]} />
          </div>
        )}
      </Loaded>
      {names.length > SHOWN_AT_FIRST && (
        <button type="button" className="link mt-2" onClick={() => setAll(!all)}>
          {all ? "Fewer values" : plural(names.length - SHOWN_AT_FIRST, "more reported value")}
        </button>
      )}
    </Section>
  );
}

