/** A thin bar for a share of a whole. */
export function Meter({ ratio, label, tone = "bg-accent", className = "w-20" }: {
  ratio: number; label: string; tone?: string; className?: string;
}) {
  const bounded = Math.min(1, Math.max(0, ratio));
  return (
    <span role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(bounded * 100)}
      className={`inline-block h-1.5 overflow-hidden rounded-full bg-sunken align-middle ${className}`}>
      <span className={`block h-full rounded-full ${tone}`} style={{ width: `${bounded * 100}%` }} />
    </span>
  );
}
