import { session } from "../api/session";
import type { Cluster, Me } from "../api/types";
import type { Live } from "../live/connection";
import { useLive, useLiveState, useMe, useResource } from "../live/hooks";
import { Link } from "../route/link";
import { useRoute } from "../route/route";
import { identityOf, signing } from "./caller";
import { LiveBadge } from "./live-badge";
import { ThemeSwitch } from "./theme-switch";

const PAGES = [["/", "Jobs"], ["/cluster", "Cluster"], ["/events", "Events"]] as const;

function Caller({ me, live }: { me: Me | undefined; live: Live }) {
  const step = signing(me, session.token() !== "");
  return (
    <>
      {me?.identity && <span className="hidden md:inline">{identityOf(me)}</span>}
      {step === "in" && <button type="button" className="link" onClick={() => live.askForToken()}>Sign in</button>}
      {step === "out" && <button type="button" className="link" title={me && identityOf(me)} onClick={() => live.signOut()}>Sign out</button>}
    </>
  );
}

export function Header() {
  const { parts } = useRoute();
  const live = useLive();
  const { phase } = useLiveState();
  const me = useMe();
  const { data: cluster } = useResource<Cluster>("/cluster");
  const section = parts[0] === undefined || parts[0] === "jobs" ? "/" : `/${parts[0]}`;
  const alarms = cluster?.alarms.length ?? 0;
  return (
    <header className="border-b border-line bg-raised">
      <div className="mx-auto flex max-w-[1480px] flex-wrap items-center gap-x-5 gap-y-1 px-4 py-2 sm:px-6">
        <Link to="/" className="font-semibold tracking-tight">
          Strata{cluster && <span className="ml-1.5 font-normal text-soft">{cluster.cluster}</span>}
        </Link>
        <nav aria-label="Pages" className="flex gap-x-4">
          {PAGES.map(([to, name]) => (
            <Link key={to} to={to} aria-current={section === to ? "page" : undefined}
              className="text-soft hover:text-ink aria-[current]:font-medium aria-[current]:text-ink">
              {name}
              {to === "/cluster" && alarms > 0 && <span className="ml-1 text-warn" title={cluster?.alarms.join("\n")}>▲<span className="sr-only"> {alarms} to resolve</span></span>}
            </Link>
          ))}
        </nav>
        <div className="ml-auto flex items-center gap-x-4 text-[12px] text-soft">
          <LiveBadge replica={cluster?.answered_by ?? ""} />
          {phase !== "unauthorized" && <Caller me={me} live={live} />}
          <ThemeSwitch />
        </div>
      </div>
    </header>
  );
}
