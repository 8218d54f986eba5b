"""HTTP server of a replica: the status page, its JSON API, metrics and probes."""
