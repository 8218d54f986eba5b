"""gRPC as clients and agents use it: channels, streams, and unary calls that find a coordinator that answers.

Begin with `channel`. Sessions themselves are in `strata.session`, which knows nothing of gRPC.
"""
