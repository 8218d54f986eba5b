"""The catalog: which checkpoints there are, and when one is committed.

`protocol` is what a saver needs of any catalog. `local` keeps one without coordinators; the coordinators' is in
`strata.client.checkpoints.catalog`.
"""
