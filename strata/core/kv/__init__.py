"""The keyspace as data: keys, records, transactions, and a view of them all in memory.

Every decision reads a `View` and returns a `Txn`; `keys` builds every key, and `records` defines most values. Begin
with `txn`, then `view`. `kv` imports nothing of the other folders of `core`.
"""
