/** The header's text on the caller. */
import type { Me } from "../api/types";

/**
 * Whether the caller can sign in, or can sign out here; null: neither.
 *
 * A cluster without tokens checks no caller, or knows its callers by certificates, which a page cannot remove.
 */
export function signing(me: Pick<Me, "identity" | "takes_tokens"> | undefined, hasToken: boolean): "in" | "out" | null {
  if (hasToken) return "out";
  return me?.takes_tokens && me.identity === "" ? "in" : null;
}

export function identityOf(me: Pick<Me, "identity" | "role">): string {
  return me.role ? `${me.identity} · ${me.role}` : me.identity;
}
