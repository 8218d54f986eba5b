import type { Cluster } from "../../api/types";
import { count, duration, plural } from "../../format/format";
import { useResource } from "../../live/hooks";
import { Fact, Facts, PageTitle, Section } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { Note, State } from "../../ui/tone";
import { EtcdTable, ReplicaTable } from "./cluster-tables";

/** Whether the control plane works, and what an operator must do. */
export function ClusterPage() {
  const cluster = useResource<Cluster>("/cluster");
  return (
    <div className="grid gap-6">
      <Loaded of={cluster}>{(data) => <Content cluster={data} />}</Loaded>
    </div>
  );
}

function Content({ cluster }: { cluster: Cluster }) {
  const ready = cluster.replicas.filter((each) => each.ready).length;
  const versions = new Set(cluster.replicas.filter((each) => !each.unreachable).map((each) => each.version));
  return (
    <>
      <div className="grid gap-2">
        <PageTitle title={`Cluster ${cluster.cluster}`}>
          <State tone={cluster.healthy ? (cluster.ready ? "good" : "warn") : "bad"}>
            {cluster.healthy ? (cluster.ready ? "healthy" : "not ready") : "unhealthy"}
          </State>
        </PageTitle>
        {cluster.reason && <Note tone={cluster.healthy ? "warn" : "bad"}>{cluster.reason}</Note>}
        {cluster.alarms.map((alarm) => <Note key={alarm} tone="warn">{alarm}</Note>)}
      </div>
      <Facts>
        <Fact name="Leader" note={`epoch ${count(cluster.leader_epoch)}`}>{cluster.leader || <span className="text-bad">none</span>}</Fact>
        <Fact name="Replicas ready" tone={ready < cluster.replicas.length ? "text-warn" : ""}>{ready} of {cluster.replicas.length}</Fact>
        <Fact name="etcd answered" tone={cluster.etcd_silence_ms > 5000 ? "text-bad" : ""} note={`revision ${count(cluster.revision)}`}>{duration(cluster.etcd_silence_ms)} ago</Fact>
        <Fact name="Sessions here">{count(cluster.sessions)}</Fact>
        <Fact name="Jobs" note={plural(cluster.jobs_by_phase.running ?? 0, "running", "running")}>{count(cluster.jobs_total)}</Fact>
        <Fact name="Audit" note="view against etcd" tone={cluster.audit_differences ? "text-bad" : ""}>{plural(cluster.audit_differences, "difference")}</Fact>
        <Fact name="Version" tone={versions.size > 1 ? "text-warn" : ""}>{versions.size > 1 ? `${versions.size} versions` : cluster.version}</Fact>
      </Facts>
      <Section title="Replicas"><ReplicaTable replicas={cluster.replicas} /></Section>
      <Section title="etcd"><EtcdTable members={cluster.etcd} /></Section>
    </>
  );
}
