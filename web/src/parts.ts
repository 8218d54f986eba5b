/**
 * Scripts loaded on demand. All are fetched after the first page: the replica that served the page may end,
 * and another one serves its data to this page, but no scripts.
 */
export const parts = {
  overview: () => import("./pages/job/overview-page"),
  ranks: () => import("./pages/ranks/ranks-page"),
  barriers: () => import("./pages/barriers/barriers-page"),
  data: () => import("./pages/data/data-page"),
  checkpoints: () => import("./pages/checkpoints/checkpoints-page"),
  lineChart: () => import("./charts/line-chart"),
  heatmap: () => import("./charts/heatmap"),
};

const AFTER_MS = 500;

export function fetchAllSoon(): void {
  setTimeout(() => {
    // a script that fails now is loaded again when it is needed, and shows its error there
    for (const load of Object.values(parts)) load().catch(() => undefined);
  }, AFTER_MS);
}
