import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { act, type ApiError } from "../../api/client";
import type { Action, Checkpoint, CheckpointAction, Checkpoints } from "../../api/types";
import { count } from "../../format/format";
import { useLiveState, useResource } from "../../live/hooks";
import { ConfirmDialog } from "../../ui/dialog";
import { consequence, forkOutcome, isOutcomeUnknown, outcome, withAnswer } from "./actions";
import type { Asked } from "./checkpoints-page";

const TITLES: Record<Action, string> = { pin: "Pin", unpin: "Unpin", tag: "Tag", untag: "Remove the tag of", fork: "Fork", delete: "Delete" };
const UNKNOWN = "The outcome is not known yet: this dialog shows it once the catalog does.";

/**
 * Ask for confirmation, with the effect as a text; then send the request to a replica and show the answer. If there is no
 * answer, the stream shows whether the action was done.
 */
export function ActionDialog({ job, path, asked, onClose }: { job: string; path: string; asked: Asked; onClose: () => void }) {
  const { action, checkpoint } = asked;
  const { base } = useLiveState();
  const cache = useQueryClient();
  const [text, setText] = useState(asked.tag);
  const given = text.trim();
  const mutation = useMutation<Checkpoint | null, ApiError>({
    mutationFn: () => act(base, job, checkpoint.step, action, { attempt: checkpoint.attempt, ...fieldsOf(action, given) }),
    onSuccess: (answer) => {
      cache.setQueryData<Checkpoints>([path], (catalog) => withAnswer(catalog, checkpoint, answer));
      onClose();
    },
  });
  const unknown = isOutcomeUnknown(mutation.error);
  const { data: catalog } = useResource<Checkpoints>(path, { keep: true });
  const { data: forked } = useResource<Checkpoints>(unknown && action === "fork" ? `/jobs/${encodeURIComponent(given)}/checkpoints` : null);
  const done = !unknown ? "" : action === "fork" ? forkOutcome(checkpoint, job, given, forked) : outcome(action, checkpoint, catalog, given);
  const error = unknown && mutation.error ? { message: `${mutation.error.message.replace(/\.$/, "")}. ${UNKNOWN}`, hint: "" } : mutation.error;
  return (
    <ConfirmDialog
      title={`${TITLES[action]} the checkpoint of step ${count(checkpoint.step)}?`} confirm={unknown ? "Try again" : `${TITLES[action].split(" ")[0]}`}
      danger={action === "delete"} busy={mutation.isPending} error={error} done={done} close={unknown ? "Close" : "Cancel"} onConfirm={() => mutation.mutate()} onClose={onClose}
    >
      <p>{consequence(action, checkpoint, job)}</p>
      {action === "tag" && <Field name="Tag" value={text} onChange={setText} fixed={unknown} required />}
      {action === "fork" && <Field name="Name of the new job" value={text} onChange={setText} fixed={unknown} required />}
      {action === "pin" && <Field name="Reason (kept with the pin)" value={text} onChange={setText} fixed={unknown} required={false} />}
    </ConfirmDialog>
  );
}

function fieldsOf(action: Action, text: string): Partial<CheckpointAction> {
  switch (action) {
    case "pin":
      return { why: text };
    case "tag":
    case "untag":
      return { tag: text };
    case "fork":
      return { into: text };
    default:
      return {};
  }
}

/** `fixed`: the request was sent, and may have taken effect. */
function Field({ name, value, onChange, fixed, required }: {
  name: string; value: string; onChange: (value: string) => void; fixed: boolean; required: boolean;
}) {
  return (
    <label className="grid gap-1">
      {name}
      <input className="field" required={required} readOnly={fixed} maxLength={200} value={value} onChange={(event) => onChange(event.target.value)} />
    </label>
  );
}
