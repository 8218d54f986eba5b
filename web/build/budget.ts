/** Fails the build if what a first page loads is larger than it may be. */
import { gzipSync } from "node:zlib";
import type { Plugin } from "vite";

export function budget(mostBytes: number): Plugin {
  return {
    name: "budget",
    enforce: "post",
    generateBundle(_options, bundle) {
      const needed = new Set<string>();
      const add = (name: string): void => {
        const chunk = bundle[name];
        if (needed.has(name) || chunk?.type !== "chunk") return;
        needed.add(name);
        chunk.imports.forEach(add);
      };
      for (const chunk of Object.values(bundle)) if (chunk.type === "chunk" && chunk.isEntry) add(chunk.fileName);
      let total = 0;
      for (const name of needed) {
        const chunk = bundle[name];
        if (chunk?.type === "chunk") total += gzipSync(chunk.code).length;
      }
      this.info(`initial JavaScript: ${(total / 1000).toFixed(1)} kB gzip of ${mostBytes / 1000} kB`);
      if (total > mostBytes) this.error(`initial JavaScript has ${total} bytes gzip, and may have ${mostBytes}: load a page or a library on demand`);
    },
  };
}
