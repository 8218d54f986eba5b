import type { Bucket } from "../../api/types";
import { count, duration, percent } from "../../format/format";
import { Empty } from "../../ui/states";

/** How many rounds took how long. A list of bars: it reads the same without the bars. */
export function LatencyHistogram({ buckets }: { buckets: readonly Bucket[] }) {
  const total = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  if (total === 0) return <Empty>No round has ended at this replica yet.</Empty>;
  const most = Math.max(...buckets.map((bucket) => bucket.count));
  return (
    <dl className="grid max-w-xl grid-cols-[auto_minmax(0,1fr)_auto_auto] items-center gap-x-3 gap-y-0.5">
      {buckets.map((bucket, i) => (
        <div key={bucket.le_s ?? "more"} className="contents">
          <dt className="text-right text-soft">{name(bucket, buckets[i - 1])}</dt>
          <dd className="contents">
            <span aria-hidden="true" className="block h-3 rounded-[2px] bg-accent" style={{ width: `${(100 * bucket.count) / most}%`, minWidth: bucket.count ? 2 : 0 }} />
            <span className="text-right">{count(bucket.count)}</span>
            <span className="text-right text-soft">{percent(bucket.count / total)}</span>
          </dd>
        </div>
      ))}
    </dl>
  );
}

function name(bucket: Bucket, before: Bucket | undefined): string {
  if (bucket.le_s !== null) return `≤ ${short(bucket.le_s)}`;
  return before?.le_s == null ? "any" : `> ${short(before.le_s)}`;
}

function short(seconds: number): string {
  return duration(seconds * 1000).replace(/\.00(?= )/, "");
}
