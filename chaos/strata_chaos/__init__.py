"""Breaks a running Strata on purpose, records what clients and etcd saw, and judges what held."""
