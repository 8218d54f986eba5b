/** Writes the licenses of the packages whose code is in the bundle beside it. */
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import type { Plugin } from "vite";

const NAMES = /^(licen[sc]e|copying)(\.|$)/i;

export function licenses(file: string, extra: readonly string[]): Plugin {
  return {
    name: "licenses",
    generateBundle(_options, bundle) {
      const found = new Set(extra);
      for (const chunk of Object.values(bundle)) {
        if (chunk.type !== "chunk") continue;
        for (const id of Object.keys(chunk.modules)) {
          const name = /.*node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(id)?.[1];
          if (name !== undefined) found.add(name);
        }
      }
      const texts = [...found].sort().map(textOf);
      this.emitFile({ type: "asset", fileName: file, source: texts.join(`\n${"-".repeat(80)}\n\n`) });
    },
  };
}

function textOf(name: string): string {
  const folder = join("node_modules", name);
  const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as { version: string; license?: string };
  const file = existsSync(folder) ? readdirSync(folder).find((each) => NAMES.test(each)) : undefined;
  if (file === undefined) throw new Error(`${name} has no license file: look at what it asks for, and put it here`);
  return `${name} ${about.version} (${about.license ?? "license below"})\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
}
