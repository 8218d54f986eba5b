"""A rank's side of the control plane: `strata.connect()`, the rank's session, its barriers and its health reports.

Begin with `connect`, then `rank_client`.
"""
