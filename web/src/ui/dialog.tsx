import { useEffect, useId, useRef, type FormEvent, type ReactNode } from "react";

/**
 * Ask before something is done. The browser's own modal dialog: it keeps the focus, and Escape closes it. With `done`
 * there is nothing left to confirm.
 */
export function ConfirmDialog({ title, children, confirm, danger = false, busy, error, done = "", close = "Cancel", onConfirm, onClose }: {
  title: string; children: ReactNode; confirm: string; danger?: boolean; busy: boolean;
  error: { message: string; hint: string } | null; done?: string; close?: string; onConfirm: () => void; onClose: () => void;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    const element = dialog.current;
    element?.showModal();
    return () => element?.close();
  }, []);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    onConfirm();
  };
  return (
    <dialog ref={dialog} aria-labelledby={id} onCancel={onClose}
      className="m-auto w-[min(30rem,calc(100vw-2rem))] rounded-lg border border-line bg-ground p-0 text-ink shadow-xl backdrop:bg-[rgb(0_0_0/0.45)]">
      <form onSubmit={submit} className="grid gap-3 p-4">
        <h2 id={id} className="text-[15px] font-semibold">{title}</h2>
        {children}
        <p role="status" className={done ? "text-good" : "sr-only"}>{done}</p>
        {!done && error && <p role="alert" className="text-bad">{[error.message, error.hint].filter(Boolean).join(": ")}</p>}
        <div className="flex justify-end gap-2">
          <button type="button" className="button" onClick={onClose}>{close}</button>
          {!done && <button type="submit" className={`button ${danger ? "danger" : "primary"}`} disabled={busy}>{confirm}</button>}
        </div>
      </form>
    </dialog>
  );
}
