"""The agent: the process between a node's ranks and the coordinators, whatever starts the ranks.

It holds the node's one session with a coordinator, serves the ranks over a Unix socket, reports their exits, and watches their
health (`health`). `strata.launch`, torchrun's adapter and standalone processes build on it. Begin with `agent`, then `relay`.
"""
