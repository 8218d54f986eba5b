import { lazy, Suspense } from "react";
import { useLiveState } from "./live/hooks";
import { ClusterPage } from "./pages/cluster/cluster-page";
import { EventsPage } from "./pages/events/events-page";
import { JobShell } from "./pages/job/job-shell";
import { JobsPage } from "./pages/jobs/jobs-page";
import { parts } from "./parts";
import { Link } from "./route/link";
import { useRoute } from "./route/route";
import { Header } from "./shell/header";
import { TokenForm } from "./shell/token-form";
import { Boundary } from "./ui/boundary";
import { PageTitle } from "./ui/section";

const Overview = lazy(parts.overview);
const RanksPage = lazy(parts.ranks);
const BarriersPage = lazy(parts.barriers);
const DataPage = lazy(parts.data);
const CheckpointsPage = lazy(parts.checkpoints);

export function App() {
  const { phase } = useLiveState();
  return (
    <>
      <a href="#main" className="sr-only focus:not-sr-only focus:fixed focus:top-2 focus:left-2 focus:z-50 focus:bg-ground focus:px-3 focus:py-1">
        Skip to the page
      </a>
      <Header />
      <main id="main" tabIndex={-1} className="mx-auto max-w-[1480px] px-4 pt-4 pb-16 sm:px-6">
        <Boundary>{phase === "unauthorized" ? <TokenForm /> : <Page />}</Boundary>
      </main>
    </>
  );
}

function Page() {
  const { parts: path } = useRoute();
  const [first, job, page, ...more] = path;
  if (first === undefined || (first === "jobs" && job === undefined)) return <JobsPage />;
  if (first === "cluster" && job === undefined) return <ClusterPage />;
  if (first === "events" && job === undefined) return <EventsPage />;
  if (first === "jobs" && job !== undefined && more.length === 0) {
    const content = pageOf(job, page);
    if (content !== null) return <JobShell key={job} job={job} page={page ?? ""}><Boundary key={page ?? ""}><Suspense>{content}</Suspense></Boundary></JobShell>;
  }
  return (
    <>
      <PageTitle title="Nothing is here" />
      <p className="mt-2 text-soft">There is no page at this address. <Link to="/" className="link in-text">All jobs</Link></p>
    </>
  );
}

function pageOf(job: string, page: string | undefined) {
  switch (page) {
    case undefined:
      return <Overview job={job} />;
    case "ranks":
      return <RanksPage job={job} />;
    case "barriers":
      return <BarriersPage job={job} />;
    case "data":
      return <DataPage job={job} />;
    case "checkpoints":
      return <CheckpointsPage job={job} />;
    case "events":
      return <EventsPage job={job} />;
    default:
      return null;
  }
}
