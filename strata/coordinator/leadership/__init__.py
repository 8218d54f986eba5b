"""Who leads: this replica's own key, the election, and the office that it brings."""
