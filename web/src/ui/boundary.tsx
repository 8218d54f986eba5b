import { Component, type ReactNode } from "react";
import { Failure } from "./states";

/** Shows the error of a broken part of the page; the rest stays. */
export class Boundary extends Component<{ children: ReactNode }, { error: Error | null }> {
  override state: { error: Error | null } = { error: null };

  static getDerivedStateFromError(error: Error) {
    return { error };
  }

  override render() {
    if (this.state.error === null) return this.props.children;
    return <Failure error={{ message: `This part of the page failed: ${this.state.error.message}`, hint: "Load the page again, if need be from another replica." }} />;
  }
}
