import type { SortingState } from "@tanstack/react-table";
import { SortButton } from "./sort-button";
import { useSorted, type Column } from "./sorting";

/** A table of a few rows. It scrolls by itself if it is wider than the page. */
export function Table<T extends object>({ label, columns, rows, keyOf, sort, fixed = false }: {
  label: string; columns: readonly Column<T>[]; rows: readonly T[]; keyOf: (row: T) => string; sort?: SortingState; fixed?: boolean;
}) {
  const sorted = useSorted(columns, rows, keyOf, sort);
  return (
    <div className="scrolls relative overflow-x-auto" tabIndex={0} role="region" aria-label={label}>
      <table className="table" aria-label={label}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.id} scope="col" className={column.align} aria-sort={column.by && !fixed ? sorted.sortOf(column.id) : undefined}>
                {column.by && !fixed ? (
                  <SortButton column={column} sort={sorted.sortOf(column.id)} toggle={sorted.toggle} />
                ) : (
                  <span title={column.title}>{column.header}</span>
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {sorted.rows.map((row) => (
            <tr key={row.id}>
              {columns.map((column) => (
                <td key={column.id} className={`${column.align ?? ""} ${column.wrap ? "wrap" : column.fill ? "fill" : ""}`}>
                  {column.cell(row.original)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
