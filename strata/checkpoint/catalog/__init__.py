"""The catalog: which checkpoints exist, and when one is committed.

`protocol` is the interface that a saver needs. `local` is a catalog without coordinators; the catalog over
coordinators is in `strata.client.checkpoints.catalog`.
"""
