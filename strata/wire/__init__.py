"""Conversion between the wire and core: protobuf messages and core values, gRPC status and errors."""
