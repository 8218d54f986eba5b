"""`strata run`: starts a node's ranks, watches them, and starts them again in the next generation.

`local_agent` decides what this node does next, `slots` and `ranks` hold the processes, `warm` prepares them, `console` and
`rank_output` carry their lines. Begin with `run`. Nothing but `strata.cli` and `strata.devcluster` stands above it.
"""
