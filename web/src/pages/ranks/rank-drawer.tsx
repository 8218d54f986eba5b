import type { Device, Finding, Rank } from "../../api/types";
import { age, bytes, count, duration, NONE } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Drawer } from "../../ui/drawer";
import { Fact, Facts, Section } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import { Note, worstTone } from "../../ui/tone";
import { isSlow } from "./rank-rows";
import { Score } from "./score";

/** One rank with its evidence, which is fetched while the drawer is open. */
export function RankDrawer({ job, rank, findings, onClose }: { job: string; rank: number; findings: readonly Finding[]; onClose: () => void }) {
  const resource = useResource<Rank>(`/jobs/${encodeURIComponent(job)}/ranks/${rank}`);
  return (
    <Drawer title={`Rank ${rank}`} onClose={onClose}>
      <Loaded of={resource}>{(data) => <Evidence rank={data} findings={findings.filter((each) => each.ranks.includes(rank))} />}</Loaded>
    </Drawer>
  );
}

function Evidence({ rank, findings }: { rank: Rank; findings: readonly Finding[] }) {
  return (
    <>
      {rank.finding && <Note tone={worstTone(findings) ?? "warn"}>{rank.finding}</Note>}
      <Facts>
        <Fact name="Host" note={rank.worker_id}>{rank.host || NONE}</Fact>
        <Fact name="Step">{count(rank.step)}</Fact>
        <Fact name="Phase" tone={rank.stalled_ms > 0 ? "text-bad" : ""} note={rank.stalled_ms > 0 ? `stuck for ${age(rank.stalled_ms)}` : `reported ${age(rank.last_seen_ms)} ago`}>{rank.phase || NONE}</Fact>
        <Fact name="Compute time" note={`median ${us(rank.median_compute_us)}`}>{us(rank.compute_us)}</Fact>
        <Fact name="To fastest"><Score value={rank.relative_score} slow={isSlow(findings)} /></Fact>
        <Fact name="To own best"><Score value={rank.own_score} slow={isSlow(findings)} /></Fact>
      </Facts>
      {rank.devices.length > 0 && <Section title="Devices">{rank.devices.map((each) => <DeviceLine key={each.uuid} device={each} />)}</Section>}
      <Section title="What is it doing?" aside="stack">
        {rank.stack ? <pre className="pre max-h-72" tabIndex={0} role="region" aria-label="Stack">{rank.stack}</pre> : <Empty>No stack: a rank's agent takes one when the rank is stuck.</Empty>}
      </Section>
      {rank.trace_file && (
        <Section title="Trace of collectives"><p><code className="break-all">{rank.trace_file}</code> <span className="text-soft">{bytes(rank.trace_bytes)}, on {rank.host}</span></p></Section>
      )}
      <Section title="What did it write last?" aside="log">
        {rank.log_file === null && <Empty>Not known (yet): its agent has not answered.</Empty>}
        {rank.log_file === "" && <Empty>Its agent keeps no log.</Empty>}
        {rank.log_file && <Written label="Log" generation={rank.log_generation} ended={rank.log_ended} lines={rank.log} />}
        {rank.log_before && <Written label="Log of the process before" {...rank.log_before} />}
      </Section>
    </>
  );
}

/** The last lines of one process, of which a rank has had several if it failed. */
function Written({ label, generation, ended, lines }: { label: string; generation: number | null; ended: string; lines: string[] }) {
  return (
    <>
      <p className="text-soft">{generation !== null && `Began in generation ${generation}`}{ended && <span className="text-bad">, {ended}</span>}</p>
      {lines.length > 0 ? <pre className="pre max-h-80" tabIndex={0} role="region" aria-label={label}>{lines.join("\n")}</pre> : <Empty>It has written nothing.</Empty>}
    </>
  );
}

function DeviceLine({ device }: { device: Device }) {
  const facts = [
    device.utilization_percent === null ? "" : `${device.utilization_percent} % busy`,
    device.memory_used_bytes === null ? "" : `${bytes(device.memory_used_bytes)} of ${bytes(device.memory_total_bytes)}`,
    device.temperature_c === null ? "" : `${device.temperature_c} °C`,
    device.power_mw === null ? "" : `${Math.round(device.power_mw / 1000)} W`,
    device.ecc_uncorrected ? `${device.ecc_uncorrected} uncorrected ECC errors` : "",
    device.xids.length > 0 ? `Xid ${device.xids.join(", ")}` : "",
  ].filter(Boolean);
  return (
    <div>
      <p><span className="font-medium">GPU {device.index}</span> {device.name}</p>
      <p className="text-soft">{facts.join(" · ")}</p>
      {device.fault && <p className="text-bad">{device.fault}</p>}
    </div>
  );
}

function us(value: number | null): string {
  return value === null ? NONE : duration(value / 1000);
}
