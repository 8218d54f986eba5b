"""Leadership: this replica's own key, the leader election, and taking over from a dead leader."""
