interface Props {
  column: { id: string; header: string; title?: string };
  sort: "ascending" | "descending" | "none";
  toggle: (id: string) => void;
}

export function SortButton({ column, sort, toggle }: Props) {
  return (
    <button type="button" title={column.title} className="group relative hover:text-ink" onClick={() => toggle(column.id)}>
      {column.header}
      <span aria-hidden="true" className={`absolute top-[0.3em] left-full pl-1 text-[9px] ${sort === "none" ? "opacity-0 group-hover:opacity-60" : ""}`}>
        {sort === "descending" ? "▼" : "▲"}
      </span>
    </button>
  );
}
