"""Test doubles for etcd, time, processes and connections, each verified against the real thing.

`memory_store` is etcd in memory (`tests/contract` compares it with the real one), `virtual_time` an event loop whose
clock jumps. `processes` freezes programs that share such a loop, and `links` connects them.
"""
