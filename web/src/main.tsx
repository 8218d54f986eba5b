import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./app";
import { Live } from "./live/connection";
import { LiveContext } from "./live/hooks";
import { pauseWhileHidden } from "./live/visibility";
import { fetchAllSoon } from "./parts";
import "./styles.css";

const cache = new QueryClient({
  defaultOptions: {
    queries: {
      refetchOnWindowFocus: false,
      refetchOnReconnect: false,
      // a change is new by its nature: comparing 1,000 ranks each second finds nothing
      structuralSharing: false,
      networkMode: "always",
      gcTime: 60_000,
    },
    mutations: { networkMode: "always" },
  },
});
const live = new Live(cache, window.location.origin);
void live.run();
pauseWhileHidden(live);
fetchAllSoon();

const root = document.getElementById("root");
if (root === null) throw new Error("index.html has no #root");
createRoot(root).render(
  <StrictMode>
    <QueryClientProvider client={cache}>
      <LiveContext value={live}>
        <App />
      </LiveContext>
    </QueryClientProvider>
  </StrictMode>,
);
