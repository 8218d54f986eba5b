/** State that lasts as long as the browser's tab: the token, and the replicas' addresses. */
const TOKEN = "strata.token";
const REPLICAS = "strata.replicas";

export const session = {
  token(): string {
    return sessionStorage.getItem(TOKEN) ?? "";
  },
  keepToken(token: string): void {
    sessionStorage.setItem(TOKEN, token);
  },
  forgetToken(): void {
    sessionStorage.removeItem(TOKEN);
  },
  replicas(): string[] {
    try {
      const kept: unknown = JSON.parse(sessionStorage.getItem(REPLICAS) ?? "[]");
      return Array.isArray(kept) ? kept.filter((each) => typeof each === "string") : [];
    } catch {
      return [];
    }
  },
  keepReplicas(urls: readonly string[]): void {
    sessionStorage.setItem(REPLICAS, JSON.stringify(urls));
  },
};
