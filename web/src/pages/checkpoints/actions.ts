/** What the actions on a checkpoint do, and how one sees in the catalog that they were done. */
import { ApiError } from "../../api/client";
import type { Action, Checkpoint, Checkpoints } from "../../api/types";
import { bytes } from "../../format/format";

/** Return why the coordinators refuse to delete a checkpoint as it is shown (PROTOCOLS 8.6); empty if nothing shown speaks against it. */
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

/** Say what confirming will do. */
export function consequence(action: Action, checkpoint: Checkpoint, job: string): string {
  switch (action) {
    case "pin":
      return "Retention keeps it until somebody unpins it.";
    case "unpin":
      return "Retention may delete it again, by its rules.";
    case "tag":
      return "A tag is a name that others can restore from. Retention keeps what has one. If another checkpoint has the name, it moves here.";
    case "untag":
      return "Nobody finds it by this name any more, and retention may delete it.";
    case "fork":
      return `Another job begins from it, and ${job} goes on. Its bytes are shared, not copied, and stay as long as the fork does.`;
    case "delete":
      return deletion(checkpoint, job);
  }
}

function deletion(checkpoint: Checkpoint, job: string): string {
  const against = obstacles(checkpoint);
  if (against.length > 0) return `The coordinators refuse this as long as ${against.join(", and ")}.`;
  if (checkpoint.origin_job !== "") return `Its record goes at once. The bytes are those of job ${checkpoint.origin_job}, and stay.`;
  const tiers = checkpoint.copies.filter((each) => each.state !== "removed").map((each) => each.tier);
  const where = tiers.length > 0 ? ` in ${tiers.join(" and ")}` : "";
  return `Nobody can restore it from now on. The processes of ${job} remove its ${bytes(checkpoint.size_bytes)}${where}, for good, as soon as they run.`;
}

/** Tell whether an error leaves it open if the action was done: no answer came, or the replica could not tell. */
export function isOutcomeUnknown(error: unknown): boolean {
  return error instanceof ApiError && (error.status === 0 || error.status >= 500);
}

/** Return what the catalog says of an action whose outcome is not known; empty as long as it says nothing. */
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

/** Return what the catalog of the new job says of a fork into it. */
export function forkOutcome(asked: Checkpoint, job: string, into: string, catalog: Checkpoints | undefined): string {
  const fork = catalog?.checkpoints.find((each) => each.origin_job === job && each.attempt === asked.attempt);
  return fork ? `Job ${into} begins from it.` : "";
}

/** A page of a catalog, the newest first, does not show what is older than all that it shows, unless it is the last. */
function covers(page: Checkpoints, asked: Checkpoint): boolean {
  const last = page.checkpoints.at(-1);
  if (page.next_page_token === "") return true;
  return last !== undefined && (last.generation - asked.generation || last.step - asked.step) < 0;
}

/** Return the catalog with what an action answered: the checkpoint as it is then, or null where its record is gone. */
export function withAnswer(catalog: Checkpoints | undefined, asked: Checkpoint, answer: Checkpoint | null): Checkpoints | undefined {
  if (catalog === undefined) return undefined;
  const is = (each: Checkpoint) => each.step === asked.step && each.attempt === asked.attempt;
  const checkpoints = catalog.checkpoints.flatMap((each) => (is(each) ? answer ?? [] : each));
  return { ...catalog, checkpoints, total: catalog.total - (catalog.checkpoints.length - checkpoints.length) };
}
