"""gRPC for clients and agents: channels, streams, and unary calls that find an answering coordinator.

Begin with `channel`. Sessions themselves are in `strata.session`, which knows nothing of gRPC.
"""
