import { count } from "../format/format";

/** The end of a list that comes in pages. */
export function Pager({ shown, total, first, next, onFirst, onNext }: {
  shown: number; total: number; first: boolean; next: string; onFirst: () => void; onNext: (token: string) => void;
}) {
  if (first && !next) return null;
  return (
    <div className="flex items-center gap-3 pt-1 text-soft">
      <span>{count(shown)} of {count(total)}</span>
      {!first && <button type="button" className="button" onClick={onFirst}>To the beginning</button>}
      {next && <button type="button" className="button" onClick={() => onNext(next)}>More</button>}
    </div>
  );
}
