import { useState, type FormEvent } from "react";
import { session } from "../api/session";
import { useLive, useLiveState } from "../live/hooks";
import { PageTitle } from "../ui/section";

/** Ask for a token. It stays in this tab, and goes to the replicas of this cluster only. */
export function TokenForm() {
  const live = useLive();
  const { problem, anonymous } = useLiveState();
  const [token, setToken] = useState("");
  const submit = (event: FormEvent) => {
    event.preventDefault();
    session.keepToken(token.trim());
    live.authorize();
  };
  return (
    <form onSubmit={submit} className="mx-auto mt-10 grid max-w-sm gap-3">
      <PageTitle title="Sign in" />
      <p className="text-soft">{anonymous ? "Every user of this host may read. To change something, sign in with an operator's token." : "This cluster requires a sign-in."} The token is kept in this tab and is forgotten with it.</p>
      {problem && <p role="alert" className="text-bad">{problem.error}</p>}
      <label className="grid gap-1">
        Token
        <input className="field" type="password" autoComplete="current-password" required autoFocus={anonymous} value={token} onChange={(event) => setToken(event.target.value)} />
      </label>
      <div className="flex gap-2">
        <button type="submit" className="button primary">Sign in</button>
        {anonymous && <button type="button" className="button" onClick={() => live.authorize()}>Go on without</button>}
      </div>
    </form>
  );
}
