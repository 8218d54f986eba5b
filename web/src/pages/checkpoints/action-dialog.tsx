import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { act, type ApiError } from "../../api/client";
import type { Action, Checkpoint } from "../../api/types";
import { bytes, count } from "../../format/format";
import { useLive, useLiveState } from "../../live/hooks";
import { ConfirmDialog } from "../../ui/dialog";
import type { Asked } from "./checkpoints-page";

const TITLES: Record<Action, string> = { pin: "Pin", unpin: "Unpin", tag: "Tag", untag: "Remove the tag of", fork: "Fork", delete: "Delete" };

/** Ask once more, with what will happen in words; then have a replica do it, and show what it answered. */
export function ActionDialog({ job, path, asked, onClose }: { job: string; path: string; asked: Asked; onClose: () => void }) {
  const { action, checkpoint } = asked;
  const { base } = useLiveState();
  const live = useLive();
  const cache = useQueryClient();
  const [why, setWhy] = useState("");
  const [tag, setTag] = useState(asked.tag);
  const [into, setInto] = useState("");
  const mutation = useMutation<Checkpoint, ApiError>({
    mutationFn: () => act(base, job, checkpoint.step, action, { attempt: checkpoint.attempt, why: why.trim(), tag: tag.trim(), into: into.trim() }),
    onSuccess: async () => {
      await cache.fetchQuery({ queryKey: [path], queryFn: ({ signal }) => live.fetch(path, signal) });
      onClose();
    },
  });
  return (
    <ConfirmDialog
      title={`${TITLES[action]} the checkpoint of step ${count(checkpoint.step)}?`} confirm={`${TITLES[action].split(" ")[0]}`}
      danger={action === "delete"} busy={mutation.isPending} error={mutation.error} onConfirm={() => mutation.mutate()} onClose={onClose}
    >
      <p>{consequence(action, checkpoint, job)}</p>
      {action === "tag" && <Field name="Tag" value={tag} onChange={setTag} required />}
      {action === "fork" && <Field name="Name of the new job" value={into} onChange={setInto} required />}
      {(action === "pin" || action === "delete") && <Field name="Why (is kept beside it)" value={why} onChange={setWhy} required={false} />}
    </ConfirmDialog>
  );
}

function Field({ name, value, onChange, required }: { name: string; value: string; onChange: (value: string) => void; required: boolean }) {
  return (
    <label className="grid gap-1">
      {name}
      <input className="field" required={required} maxLength={200} value={value} onChange={(event) => onChange(event.target.value)} />
    </label>
  );
}

function consequence(action: Action, checkpoint: Checkpoint, job: string): string {
  switch (action) {
    case "pin":
      return "Retention keeps it until somebody unpins it.";
    case "unpin":
      return "Retention may delete it again, by its rules.";
    case "tag":
      return "A tag is a name that others can restore from. Retention keeps what has one.";
    case "untag":
      return "Nobody finds it by this name any more, and retention may delete it.";
    case "fork":
      return `Another job begins from it, and ${job} goes on. Its bytes are shared, not copied.`;
    case "delete":
      return `${bytes(checkpoint.size_bytes)} in ${checkpoint.copies.map((copy) => copy.tier).join(" and ") || "no tier"} go, for good.${
        checkpoint.references > 1 ? " Bytes that others use stay." : ""}${checkpoint.latest ? " It is the latest: without it, the next generation begins from the one before." : ""}`;
  }
}
