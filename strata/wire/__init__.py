"""Between the wire and the rest: protobuf messages and core values, gRPC status and errors."""
