import { useEffect, useId, useRef, type ReactNode } from "react";

/** A panel beside the page for one thing of a list. The list stays usable; Escape closes the panel. */
export function Drawer({ title, onClose, children }: { title: string; onClose: () => void; children: ReactNode }) {
  const panel = useRef<HTMLElement>(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    panel.current?.focus({ preventScroll: true });
    return () => {
      if (before instanceof HTMLElement && before.isConnected) before.focus({ preventScroll: true });
    };
  }, []);
  useEffect(() => {
    const onKey = (event: globalThis.KeyboardEvent) => {
      if (event.key === "Escape" && document.querySelector("dialog[open]") === null) onClose();
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [onClose]);
  return (
    <aside ref={panel} tabIndex={-1} aria-labelledby={id}
      className="fixed inset-y-0 right-0 z-30 w-[min(34rem,100vw)] overflow-y-auto border-l border-line bg-ground shadow-2xl outline-none">
      <div className="sticky top-0 z-10 flex items-center gap-3 border-b border-line bg-ground px-4 py-2.5">
        <h2 id={id} className="text-[15px] font-semibold">{title}</h2>
        <button type="button" className="button ml-auto" onClick={onClose}>Close</button>
      </div>
      <div className="grid gap-5 p-4">{children}</div>
    </aside>
  );
}
