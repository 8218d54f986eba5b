"""Disaster recovery: backups of the control plane, and what its keys become after etcd was lost (PROTOCOLS 9).

Begin with `control_plane`; `catalog` is its part about checkpoints.
"""
