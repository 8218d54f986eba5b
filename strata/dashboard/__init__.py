"""What a replica shows over HTTP: the status page, its JSON, metrics and probes."""
