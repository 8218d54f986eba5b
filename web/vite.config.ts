import tailwindcss from "@tailwindcss/vite";
import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";
import { budget } from "./build/budget.ts";
import { licenses } from "./build/licenses.ts";

/** Where `npm run dev` finds a replica: the first of `python -m web.fixture`, or one of `strata dev`. */
const REPLICA = process.env.STRATA_REPLICA ?? "http://127.0.0.1:8101";

export default defineConfig({
  plugins: [react(), tailwindcss(), budget(150_000), licenses("LICENSES.txt", ["tailwindcss"])],
  server: { proxy: { "/api": REPLICA } },
  build: {
    outDir: "../strata/dashboard/bundle",
    emptyOutDir: true,
    target: "es2023",
    // the policy of the page allows no script and no font from a data: address
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    modulePreload: { polyfill: false },
  },
});
