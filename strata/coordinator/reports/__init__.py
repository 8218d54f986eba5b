"""Reports of ranks and members, kept in memory for pages, charts and diagnoses."""
