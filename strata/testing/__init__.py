"""Test doubles for etcd, time, processes and connections, each tested against the real counterpart.

`memory_store` is etcd in memory (`tests/contract` compares it with etcd). `virtual_time` is an event loop whose clock
jumps. `processes` freezes programs that share such a loop, and `links` connects them.
"""
