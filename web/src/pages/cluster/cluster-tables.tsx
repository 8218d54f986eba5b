import type { Cluster } from "../../api/types";
import { bytes, NONE } from "../../format/format";
import type { Column } from "../../ui/sorting";
import { Table } from "../../ui/table";
import { State } from "../../ui/tone";

type Replica = Cluster["replicas"][number];
type Member = Cluster["etcd"][number];

const REPLICAS: readonly Column<Replica>[] = [
  { id: "replica", header: "Replica", cell: (each) => <span className="font-medium">{each.replica}{each.answered && <span className="ml-2 font-normal text-soft">answers you</span>}</span> },
  { id: "ready", header: "State", cell: (each) => <State tone={each.ready ? "good" : each.unreachable ? "bad" : "warn"}>{each.ready ? "ready" : each.unreachable ? each.reason : "not ready"}</State> },
  { id: "leader", header: "Role", cell: (each) => (each.unreachable ? NONE : each.leader ? "leader" : "follower") },
  { id: "address", header: "Address", cell: (each) => each.address },
  { id: "http", header: "Dashboard", cell: (each) => (each.http_url ? <a className="link" href={each.http_url}>{each.http_url}</a> : NONE) },
  { id: "version", header: "Version", cell: (each) => each.version || NONE },
  { id: "reason", header: "", wrap: true, cell: (each) => !each.unreachable && each.reason },
];

const MEMBERS: readonly Column<Member>[] = [
  { id: "endpoint", header: "Endpoint", cell: (each) => <span className="font-medium">{each.endpoint}</span> },
  { id: "healthy", header: "State", cell: (each) => <State tone={each.healthy ? "good" : "bad"}>{each.healthy ? "healthy" : "unhealthy"}</State> },
  { id: "leader", header: "Role", cell: (each) => (each.leader ? "leader" : "follower") },
  { id: "size", header: "Database", align: "right", cell: (each) => bytes(each.db_size_bytes) },
  { id: "version", header: "Version", cell: (each) => each.version },
  { id: "said", header: "", wrap: true, cell: (each) => <span className={each.error ? "text-bad" : "text-warn"}>{each.error || each.warning}</span> },
];

export function ReplicaTable({ replicas }: { replicas: readonly Replica[] }) {
  return <Table label="Replicas" columns={REPLICAS} rows={replicas} keyOf={(each) => each.replica} fixed />;
}

export function EtcdTable({ members }: { members: readonly Member[] }) {
  return <Table label="Members of etcd" columns={MEMBERS} rows={members} keyOf={(each) => each.endpoint} fixed />;
}
