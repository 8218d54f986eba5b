"""Disaster recovery: backups of the control plane, and rebuilding its keys after etcd was lost (PROTOCOLS 9).

Begin with `control_plane`, which uses `catalog` for the checkpoints.
"""
