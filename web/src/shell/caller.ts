/** What the header says of the caller. */
import type { Me } from "../api/types";

/**
 * Whether the caller can sign in, or out of what was signed in here; null: neither.
 *
 * A cluster that takes no tokens asks nobody, or knows its callers by certificates, which no page can take away.
 */
export function signing(me: Pick<Me, "identity" | "takes_tokens"> | undefined, hasToken: boolean): "in" | "out" | null {
  if (hasToken) return "out";
  return me?.takes_tokens && me.identity === "" ? "in" : null;
}

export function identityOf(me: Pick<Me, "identity" | "role">): string {
  return me.role ? `${me.identity} · ${me.role}` : me.identity;
}
