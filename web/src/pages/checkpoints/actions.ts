/** The effects of the actions on a checkpoint, and how the catalog shows that they were done. */
import { ApiError } from "../../api/client";
import type { Action, Checkpoint, Checkpoints } from "../../api/types";
import { bytes } from "../../format/format";

/** Return why the coordinators refuse to delete a checkpoint as it is shown (PROTOCOLS 8.6); empty if no shown value prevents it. */
export function obstacles(checkpoint: Checkpoint): string[] {
  const { latest, pinned, tags, references, readers } = checkpoint;
  return [
    latest ? "it is the latest" : "",
    pinned ? "it is pinned" : "",
    tags.length > 0 ? `it is tagged ${tags.join(", ")}` : "",
    references > 0 ? "other checkpoints or jobs use its bytes" : "",
    readers > 0 ? "it is being read" : "",
  ].filter(Boolean);
}

/** Return the effect of confirming, as a text. */
export function consequence(action: Action, checkpoint: Checkpoint, job: string): string {
  switch (action) {
    case "pin":
      return "Retention keeps it until it is unpinned.";
    case "unpin":
      return "Retention may delete it again, by its rules.";
    case "tag":
      return "A tag is a name to restore from. Retention keeps tagged checkpoints. If another checkpoint has the name, the tag moves here.";
    case "untag":
      return "This name no longer finds it, and retention may delete it.";
    case "fork":
      return `Another job begins from it, and ${job} goes on. Its bytes are shared, not copied, and stay as long as the fork does.`;
    case "delete":
      return deletion(checkpoint, job);
  }
}

function deletion(checkpoint: Checkpoint, job: string): string {
  const against = obstacles(checkpoint);
  if (against.length > 0) return `The coordinators refuse this as long as ${against.join(", and ")}.`;
  if (checkpoint.origin_job !== "") return `Its record is deleted at once. The bytes are those of job ${checkpoint.origin_job}, and stay.`;
  const tiers = checkpoint.copies.filter((each) => each.state !== "removed").map((each) => each.tier);
  const where = tiers.length > 0 ? ` in ${tiers.join(" and ")}` : "";
  return `It cannot be restored from now on. The processes of ${job} remove its ${bytes(checkpoint.size_bytes)}${where}, for good, as soon as they run.`;
}

/** Return whether the action's outcome is unknown after an error: no answer came, or the replica did not know. */
export function isOutcomeUnknown(error: unknown): boolean {
  return error instanceof ApiError && (error.status === 0 || error.status >= 500);
}

/** Return the outcome of an action as the catalog shows it; empty while the catalog does not show it. */
export function outcome(action: Action, asked: Checkpoint, catalog: Checkpoints | undefined, tag: string): string {
  if (catalog === undefined) return "";
  const now = catalog.checkpoints.find((each) => each.step === asked.step && each.attempt === asked.attempt);
  if (action === "delete") {
    if (now === undefined) return covers(catalog, asked) ? "It is deleted." : "";
    return now.state === "deleting" ? "It is being deleted." : "";
  }
  if (now === undefined) return "";
  switch (action) {
    case "pin":
      return now.pinned ? "It is pinned now." : "";
    case "unpin":
      return now.pinned ? "" : "It is not pinned any more.";
    case "tag":
      return now.tags.includes(tag) ? `It is tagged ${tag} now.` : "";
    case "untag":
      return now.tags.includes(tag) ? "" : `It is not tagged ${tag} any more.`;
    case "fork":
      return "";
  }
}

/** Return the outcome of a fork as the new job's catalog shows it. */
export function forkOutcome(asked: Checkpoint, job: string, into: string, catalog: Checkpoints | undefined): string {
  const fork = catalog?.checkpoints.find((each) => each.origin_job === job && each.attempt === asked.attempt);
  return fork ? `Job ${into} begins from it.` : "";
}

/** A page of a catalog, the newest first, does not show checkpoints older than its last one, unless it is the last page. */
function covers(page: Checkpoints, asked: Checkpoint): boolean {
  const last = page.checkpoints.at(-1);
  if (page.next_page_token === "") return true;
  return last !== undefined && (last.generation - asked.generation || last.step - asked.step) < 0;
}

/** Return the catalog with an action's answer: the checkpoint after it, or null if its record is deleted. */
export function withAnswer(catalog: Checkpoints | undefined, asked: Checkpoint, answer: Checkpoint | null): Checkpoints | undefined {
  if (catalog === undefined) return undefined;
  const is = (each: Checkpoint) => each.step === asked.step && each.attempt === asked.attempt;
  const checkpoints = catalog.checkpoints.flatMap((each) => (is(each) ? answer ?? [] : each));
  return { ...catalog, checkpoints, total: catalog.total - (catalog.checkpoints.length - checkpoints.length) };
}
