"""Checks of etcd by a replica: its version, its members, and whether it accepts writes."""
