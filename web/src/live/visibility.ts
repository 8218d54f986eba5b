/** A hidden page holds no stream: neither a tab in the background nor one that the browser keeps for "back". */
import type { Live } from "./connection";

const HIDDEN_MS = 20_000;

export function pauseWhileHidden(live: Live): void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const look = () => {
    clearTimeout(timer);
    if (document.visibilityState === "visible") live.resume();
    else timer = setTimeout(() => live.pause(), HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pagehide", () => live.pause());
  window.addEventListener("pageshow", () => live.resume());
}
