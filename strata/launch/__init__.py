"""`strata run`: starts a node's ranks, watches them, and starts them again in the next generation.

`local_agent` decides what this node does next, `slots` and `ranks` hold the processes, `warm` prepares them,
`console` and `rank_output` pass on the ranks' output. Begin with `run`. Only `strata.cli` imports this package.
"""
