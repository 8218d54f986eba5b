"""The catalog: which checkpoints exist, and when one is committed.

`protocol` is what a saver needs from any catalog. `local` is a catalog without coordinators; the coordinators' one
is in `strata.client.checkpoints.catalog`.
"""
