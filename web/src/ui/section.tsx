import { useEffect, useId, type ReactNode } from "react";

/** A part of a page. Its heading is the question that it answers, or the thing it shows. */
export function Section({ title, aside, children, className = "" }: {
  title: string; aside?: ReactNode; children: ReactNode; className?: string;
}) {
  const id = useId();
  return (
    <section aria-labelledby={id} className={`min-w-0 ${className}`}>
      <div className="mb-1.5 flex flex-wrap items-baseline gap-x-3">
        <h2 id={id} className="text-[13px] font-semibold">{title}</h2>
        {aside !== undefined && <div className="text-[12px] text-soft">{aside}</div>}
      </div>
      {children}
    </section>
  );
}

/** The heading of a page, and the title of its tab. */
export function PageTitle({ title, children, hidden = false }: { title: string; children?: ReactNode; hidden?: boolean }) {
  useEffect(() => {
    document.title = `${title} · Strata`;
  }, [title]);
  return (
    <div className={hidden ? "sr-only" : "flex flex-wrap items-baseline gap-x-3 gap-y-1"}>
      <h1 className="text-[17px] font-semibold">{title}</h1>
      {children}
    </div>
  );
}

/** A few numbers that are read at a glance. */
export function Facts({ children }: { children: ReactNode }) {
  return <dl className="grid grid-cols-[repeat(auto-fill,minmax(8.5rem,1fr))] gap-x-6 gap-y-3">{children}</dl>;
}

export function Fact({ name, children, note, tone = "" }: { name: string; children: ReactNode; note?: ReactNode; tone?: string }) {
  return (
    <div className="min-w-0">
      <dt className="text-[12px] text-soft">{name}</dt>
      <dd>
        <span className={`block text-[17px] leading-6 font-medium ${tone}`}>{children}</span>
        {note !== undefined && <span className="block text-[12px] text-soft">{note}</span>}
      </dd>
    </div>
  );
}
