/** The four tones, always with a word beside the colour. */
export type Tone = "good" | "warn" | "bad" | "idle";

const DOT: Record<Tone, string> = { good: "bg-good", warn: "bg-warn", bad: "bg-bad", idle: "border border-control" };
const GROUND: Record<Tone, string> = {
  good: "bg-good-ground border-good", warn: "bg-warn-ground border-warn", bad: "bg-bad-ground border-bad", idle: "bg-raised border-control",
};

export function Dot({ tone, pulse = false }: { tone: Tone; pulse?: boolean }) {
  return <span aria-hidden="true" className={`inline-block size-[7px] self-center shrink-0 rounded-full ${DOT[tone]} ${pulse ? "pulse" : ""}`} />;
}

export function State({ tone, children }: { tone: Tone; children: React.ReactNode }) {
  return (
    <span className="inline-flex items-baseline gap-1.5 whitespace-nowrap">
      <Dot tone={tone} />
      {children}
    </span>
  );
}

/** A sentence that needs attention. */
export function Note({ tone, children }: { tone: Tone; children: React.ReactNode }) {
  return <div className={`rounded-md border-l-3 px-3 py-1.5 ${GROUND[tone]}`}>{children}</div>;
}

export function toneOfPhase(phase: string): Tone {
  switch (phase) {
    case "running":
      return "good";
    case "failed":
    case "unreadable":
      return "bad";
    case "waiting":
    case "stopping":
      return "warn";
    default:
      return "idle";
  }
}

/** A job goes on with slow ranks and with held saves; every other finding stops it, or casts doubt on its data. */
export function toneOfFinding(kind: string): Tone {
  return kind === "slow" || kind === "held" ? "warn" : "bad";
}

/** The worst tone of these findings; null if there is none. */
export function worstTone(findings: readonly { kind: string }[]): Tone | null {
  if (findings.length === 0) return null;
  return findings.some((each) => toneOfFinding(each.kind) === "bad") ? "bad" : "warn";
}

export function toneOfCheckpoint(state: string): Tone {
  switch (state) {
    case "committed":
      return "good";
    case "open":
    case "prepared":
      return "warn";
    case "corrupt":
    case "aborted":
      return "bad";
    default: // deleting
      return "idle";
  }
}
