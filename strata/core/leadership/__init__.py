"""Who leads, and whether a replica is fit to serve: the lease, the fence, takeover, and what etcd must be able to do.

Begin with `leader` (PROTOCOLS 4).
"""
