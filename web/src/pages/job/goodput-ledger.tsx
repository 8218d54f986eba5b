import type { Goodput } from "../../api/types";
import { duration, percent } from "../../format/format";
import { causeWords, ledger } from "../../format/goodput";

const COLORS = ["--cause-1", "--cause-2", "--cause-3", "--cause-4", "--cause-5", "--cause-6"];

/** Where the wall time went: a bar, and the same as a list whose shares sum to 100 %. */
export function GoodputLedger({ goodput }: { goodput: Goodput }) {
  let other = 0;
  const parts = ledger(goodput).map((part) => ({
    ...part,
    color: part.useful ? "--good" : (COLORS[other++] ?? "--cause-6"),
  }));
  return (
    <div className="grid gap-3">
      <div aria-hidden="true" className="flex h-4 gap-px overflow-hidden rounded-[4px] bg-ground">
        {parts.map((part) => (
          <span key={part.cause} title={`${causeWords(part.cause)}: ${percent(part.ratio)}`} style={{ background: `var(${part.color})`, flex: `${part.ratio} 0 0%` }} />
        ))}
      </div>
      <table className="table w-full max-w-xl">
        <caption className="sr-only">Wall time by cause</caption>
        <thead>
          <tr><th scope="col">Cause</th><th scope="col" className="right">Time</th><th scope="col" className="right">Share</th></tr>
        </thead>
        <tbody>
          {parts.map((part) => (
            <tr key={part.cause}>
              <td>
                <span aria-hidden="true" className="mr-2 inline-block size-2.5 rounded-[2px]" style={{ background: `var(${part.color})` }} />
                <span className={part.useful ? "font-medium" : ""}>{causeWords(part.cause)}</span>
              </td>
              <td className="right">{duration(part.seconds * 1000)}</td>
              <td className="right">{percent(part.ratio)}</td>
            </tr>
          ))}
          <tr className="text-soft">
            <td>wall time</td>
            <td className="right">{duration(goodput.wall_s * 1000)}</td>
            <td className="right">{percent(parts.reduce((sum, part) => sum + part.ratio, 0))}</td>
          </tr>
        </tbody>
      </table>
    </div>
  );
}
