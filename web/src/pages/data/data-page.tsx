import type { Dataset, Datasets } from "../../api/types";
import { count, plural } from "../../format/format";
import { useResource } from "../../live/hooks";
import { PageTitle, Section } from "../../ui/section";
import { Empty, Loaded } from "../../ui/states";
import type { Column } from "../../ui/sorting";
import { Table } from "../../ui/table";
import { balance } from "./balance";
import { OwnerTable } from "./owner-table";

type Cursor = Datasets["cursors"][number];

const CURSORS: readonly Column<Cursor>[] = [
  { id: "dataset", header: "Dataset", cell: (each) => <span className="font-medium">{each.dataset}</span> },
  { id: "epoch", header: "Epoch", align: "right", cell: (each) => count(each.epoch) },
  { id: "samples", header: "Samples used", align: "right", cell: (each) => count(each.samples) },
  { id: "length", header: "Of", align: "right", cell: (each) => count(each.length) },
  { id: "order", header: "Order", cell: (each) => each.order },
  { id: "step", header: "At step", align: "right", cell: (each) => count(each.step) },
];

/** Which member reads which shards, whether the shares are even, and how far each reader is. */
export default function DataPage({ job }: { job: string }) {
  const resource = useResource<Datasets>(`/jobs/${encodeURIComponent(job)}/datasets`);
  return (
    <div className="grid gap-6">
      <PageTitle title={`Data of ${job}`} hidden />
      <Loaded of={resource}>
        {(data) => (
          <>
            <Section title="How far is it?" aside="as of the latest committed checkpoint">
              {data.cursors.length === 0 ? <Empty>No checkpoint has a position in the data yet.</Empty> : <Table label="Positions" columns={CURSORS} rows={data.cursors} keyOf={(each) => each.dataset} fixed />}
            </Section>
            {data.datasets.length === 0 ? <Empty>The job has registered no dataset.</Empty> : data.datasets.map((each) => <Assignment key={each.name} dataset={each} />)}
          </>
        )}
      </Loaded>
    </div>
  );
}

function Assignment({ dataset }: { dataset: Dataset }) {
  const { low, high, even } = balance(dataset.owned);
  const words = even
    ? `Even: ${low === high ? plural(low, "shard") : `${low} to ${high} shards`} a member.`
    : `Uneven: ${low} to ${high} shards a member.`;
  return (
    <Section title={dataset.name} aside={dataset.uri}>
      <p className="mb-2">
        <span className={even ? "" : "text-warn"}>{words}</span>{" "}
        <span className="text-soft">
          {plural(dataset.shards, "shard")} on {plural(Object.keys(dataset.owned).length, "member")}, {count(dataset.moved)} moved from where the ring puts them · assignment {dataset.assignment_version}, generation {dataset.generation}
        </span>
      </p>
      <OwnerTable dataset={dataset} high={high} />
    </Section>
  );
}
