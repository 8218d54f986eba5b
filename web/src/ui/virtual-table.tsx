import type { SortingState } from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import { memo, useEffect, useRef, useState, type KeyboardEvent } from "react";
import { SortButton } from "./sort-button";
import { useSorted, type Column } from "./sorting";

const ROW_PX = 27;
const OVERSCAN = 6;

/**
 * A table of many rows, of which only those in sight are in the document.
 *
 * One row is in the tab order: the arrow keys, Page up and down, Home and End move it, Enter opens it.
 */
export function VirtualTable<T extends object>({ label, columns, rows, keyOf, sort, height, least, current, onOpen }: {
  label: string; columns: readonly Column<T>[]; rows: readonly T[]; keyOf: (row: T) => string; sort?: SortingState;
  height: string; least: string; current: string | null; onOpen: (row: T) => void;
}) {
  const sorted = useSorted(columns, rows, keyOf, sort);
  const scroller = useRef<HTMLDivElement>(null);
  const focused = useRef(0);
  const wanted = useRef<number | null>(null);
  const virtual = useVirtualizer({
    count: sorted.rows.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_PX,
    overscan: OVERSCAN,
    scrollPaddingStart: ROW_PX,
    useFlushSync: false,
  });
  const items = virtual.getVirtualItems();
  const first = items[0]?.index ?? 0;
  const last = items.at(-1)?.index ?? 0;
  const entry = Math.min(Math.max(focused.current, first), last);

  const move = (to: number) => {
    const index = Math.min(Math.max(to, 0), sorted.rows.length - 1);
    focused.current = index;
    wanted.current = index;
    virtual.scrollToIndex(index);
    focusWanted();
  };
  // a row that was out of sight is there some renders later
  const focusWanted = () => {
    const row = wanted.current === null ? null : scroller.current?.querySelector<HTMLElement>(`[data-index="${wanted.current}"]`);
    if (!row) return;
    wanted.current = null;
    row.focus({ preventScroll: true });
  };
  useEffect(focusWanted);
  const onKeyDown = (event: KeyboardEvent<HTMLDivElement>, index: number, row: T) => {
    const page = Math.floor((scroller.current?.clientHeight ?? 300) / ROW_PX) - 2;
    const to: Record<string, number> = {
      ArrowDown: index + 1, ArrowUp: index - 1, PageDown: index + page, PageUp: index - page, Home: 0, End: sorted.rows.length - 1,
    };
    if (event.key in to) move(to[event.key] ?? index);
    else if (event.key === "Enter" || event.key === " ") onOpen(row);
    else return;
    event.preventDefault();
  };
  const newest = useRef<Handlers<T>>(null!);
  newest.current = { open: onOpen, key: onKeyDown, focus: (index) => { focused.current = index; } };
  const [handlers] = useState((): Handlers<T> => ({
    open: (row) => newest.current.open(row),
    key: (event, index, row) => newest.current.key(event, index, row),
    focus: (index) => newest.current.focus(index),
  }));

  return (
    <div
      ref={scroller} role="table" aria-label={label} aria-rowcount={sorted.rows.length + 1} tabIndex={-1}
      className="overflow-auto rounded-md border border-line [contain:strict]"
      style={{ height, ["--least" as string]: least, ["--columns" as string]: columns.map((column) => column.width ?? "minmax(4rem,1fr)").join(" ") }}
    >
      <div role="rowgroup" className="sticky top-0 z-10 min-w-[var(--least)] border-b border-line bg-raised">
        <div role="row" aria-rowindex={1} className="grid-row h-[26px] px-2.5 text-[12px] font-medium text-soft">
          {columns.map((column) => (
            <div key={column.id} role="columnheader" aria-sort={column.by ? sorted.sortOf(column.id) : undefined}
              className={`whitespace-nowrap ${column.align === "right" ? "text-right" : ""}`}>
              {column.by ? <SortButton column={column} sort={sorted.sortOf(column.id)} toggle={sorted.toggle} /> : column.header}
            </div>
          ))}
        </div>
      </div>
      <div role="rowgroup" className="relative min-w-[var(--least)]" style={{ height: virtual.getTotalSize() }}>
        {items.map((item) => {
          const row = sorted.rows[item.index];
          return row && (
            <Row key={row.id} columns={columns} row={row.original} index={item.index} start={item.start}
              current={row.id === current} entry={item.index === entry} handlers={handlers} />
          );
        })}
      </div>
    </div>
  );
}

interface Handlers<T> {
  readonly open: (row: T) => void;
  readonly key: (event: KeyboardEvent<HTMLDivElement>, index: number, row: T) => void;
  readonly focus: (index: number) => void;
}

interface RowProps<T> {
  columns: readonly Column<T>[];
  row: T;
  index: number;
  start: number;
  current: boolean;
  entry: boolean;
  handlers: Handlers<T>;
}

// scrolling makes the rows that come into sight, and leaves the others as they are
const Row = memo(function Row<T extends object>({ columns, row, index, start, current, entry, handlers }: RowProps<T>) {
  return (
    <div
      role="row" aria-rowindex={index + 2} data-index={index} aria-current={current || undefined} tabIndex={entry ? 0 : -1}
      className="grid-row virtual-row px-2.5 whitespace-nowrap hover:bg-raised aria-[current]:bg-sunken"
      style={{ transform: `translateY(${start}px)` }}
      onClick={() => handlers.open(row)} onKeyDown={(event) => handlers.key(event, index, row)} onFocus={() => handlers.focus(index)}
    >
      {columns.map((column) => (
        <div key={column.id} role="cell" className={column.align ?? "cell"}>{column.cell(row)}</div>
      ))}
    </div>
  );
}) as <T extends object>(props: RowProps<T>) => React.ReactNode;
