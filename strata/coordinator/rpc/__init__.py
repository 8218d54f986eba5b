"""The gRPC port: handlers made from the table of methods, streams, and the bytes of unsent answers."""
