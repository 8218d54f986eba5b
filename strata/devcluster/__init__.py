"""A control plane on one machine, for development, demo and tests: etcd members and coordinators as child processes.

Begin with `local_cluster`.
"""
