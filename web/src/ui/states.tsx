import type { ReactNode } from "react";
import type { Resource } from "../live/hooks";

/** Why this part is empty, and what would fill it. */
export function Empty({ children }: { children: ReactNode }) {
  return <p className="rounded-md bg-raised px-3 py-2.5 text-soft">{children}</p>;
}

export function Failure({ error }: { error: { message: string; hint: string } }) {
  return (
    <div role="alert" className="rounded-md border-l-3 border-bad bg-bad-ground px-3 py-2">
      <p>{error.message}</p>
      {error.hint && <p className="text-soft">{error.hint}</p>}
    </div>
  );
}

/** Show a resource's data; without data, the reason. Data of a removed resource is not shown any longer. */
export function Loaded<T>({ of, children }: { of: Resource<T>; children: (data: T) => ReactNode }) {
  if (of.error !== null && (of.data === undefined || of.error.status === 404 || of.error.status === 403)) {
    return <Failure error={of.error} />;
  }
  if (of.data === undefined) return <p className="py-2 text-soft" role="status">Loading…</p>;
  return <>{children(of.data)}</>;
}
