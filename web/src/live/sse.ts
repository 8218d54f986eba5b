/** A parser of server-sent events, fed with text as it arrives. */

export interface SseEvent {
  readonly event: string;
  readonly data: string;
  readonly id: string;
}

/** Splits a stream into events. Comments are dropped: they only show that bytes arrive. */
export class SseParser {
  #pending: string[] = [];
  #event = "";
  #data: string[] = [];
  #id = "";
  #skipLineFeed = false;

  /** Return the events that `text` completes. */
  push(text: string): SseEvent[] {
    const found: SseEvent[] = [];
    let rest = text;
    if (this.#skipLineFeed && rest.startsWith("\n")) rest = rest.slice(1);
    if (text.length > 0) this.#skipLineFeed = false;
    let begin = 0;
    for (let at = 0; at < rest.length; at++) {
      const code = rest.charCodeAt(at);
      if (code !== 10 && code !== 13) continue;
      this.#pending.push(rest.slice(begin, at));
      this.#line(this.#pending.join(""), found);
      this.#pending = [];
      if (code === 13) {
        if (at + 1 === rest.length) this.#skipLineFeed = true;
        else if (rest.charCodeAt(at + 1) === 10) at++;
      }
      begin = at + 1;
    }
    // pieces are joined once their line is complete: a body of a megabyte comes in many
    if (begin < rest.length) this.#pending.push(rest.slice(begin));
    return found;
  }

  #line(line: string, found: SseEvent[]): void {
    if (line === "") {
      if (this.#data.length > 0) {
        found.push({ event: this.#event || "message", data: this.#data.join("\n"), id: this.#id });
      }
      this.#event = "";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line.charAt(colon + 1) === " " ? colon + 2 : colon + 1);
    if (field === "event") this.#event = value;
    else if (field === "data") this.#data.push(value);
    else if (field === "id" && !value.includes("\0")) this.#id = value;
  }
}
