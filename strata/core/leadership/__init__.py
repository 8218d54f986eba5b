"""Leadership: the election, lease, fence and takeover, and the checks that a replica and its etcd are fit to serve.

Begin with `leader` (PROTOCOLS 4).
"""
