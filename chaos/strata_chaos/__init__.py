"""Fault injection for a running Strata, histories of its clients and of etcd, and checkers of the invariants."""
