"""How the table of requests and the streams stand behind a gRPC port, and what callers are owed."""
