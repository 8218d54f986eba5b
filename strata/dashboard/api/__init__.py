"""The HTTP API of a replica: resources as JSON below `/api/v1`, a stream of their changes, and a few actions."""
