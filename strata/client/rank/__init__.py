"""A rank's side of the control plane: `strata.connect()`, its session and barriers, and the health that it reports.

Begin with `connect`, then `rank_client`.
"""
