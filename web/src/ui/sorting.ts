/** Columns, and rows in the order that the reader chose: TanStack Table behind one small interface. */
import {
  createSortedRowModel, rowSortingFeature, sortFn_basic, tableFeatures, useTable,
  type ColumnDef, type SortingState,
} from "@tanstack/react-table";
import { useMemo, useState, type ReactNode } from "react";

export interface Column<T> {
  readonly id: string;
  readonly header: string;
  /** The header's meaning, if a word is not enough. */
  readonly title?: string;
  readonly cell: (row: T) => ReactNode;
  /** The value that the column is sorted by; null comes last. Without it the column is not sortable. */
  readonly by?: (row: T) => number | string | null;
  readonly align?: "right";
  /** Its text may take several lines, and it takes the space that is left; `fill` takes the space only. */
  readonly wrap?: boolean;
  readonly fill?: boolean;
  /** Of a grid: its track. */
  readonly width?: string;
}

const features = tableFeatures({
  rowSortingFeature,
  sortedRowModel: createSortedRowModel(),
  sortFns: { basic: sortFn_basic },
});

export interface Sorted<T> {
  readonly rows: readonly { readonly id: string; readonly original: T }[];
  readonly sortOf: (id: string) => "ascending" | "descending" | "none";
  readonly toggle: (id: string) => void;
}

export function useSorted<T extends object>(
  columns: readonly Column<T>[], data: readonly T[], keyOf: (row: T) => string, initial: SortingState = [],
): Sorted<T> {
  const [sorting, setSorting] = useState<SortingState>(initial);
  const definitions = useMemo(
    () =>
      columns.map((column): ColumnDef<typeof features, T> => ({
        id: column.id,
        accessorFn: (row: T) => column.by?.(row) ?? undefined,
        enableSorting: column.by !== undefined,
        sortFn: "basic",
        sortUndefined: "last",
      })),
    [columns],
  );
  const table = useTable({
    features,
    columns: definitions,
    data: data as T[],
    getRowId: keyOf,
    state: { sorting },
    onSortingChange: setSorting,
  });
  const first = sorting[0];
  return {
    rows: table.getRowModel().rows,
    sortOf: (id) => (first?.id !== id ? "none" : first.desc ? "descending" : "ascending"),
    toggle: (id) => setSorting([{ id, desc: first?.id === id && !first.desc }]),
  };
}
