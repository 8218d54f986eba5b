"""The keyspace as data: keys, records, transactions, and a view of them all in memory.

Every decision reads a `View` and returns a `Txn`; `keys` builds every key and `records` names every value. Begin with `txn`, then
`view`. It imports nothing of the other folders of `core`.
"""
