"""Stand-ins for the world, each verified against what it stands in for.

`memory_store` is etcd without processes (`tests/contract` holds it to the real one), `virtual_time`
is an event loop whose clock jumps, `processes` freezes programs that share it, `links` joins them.
"""
