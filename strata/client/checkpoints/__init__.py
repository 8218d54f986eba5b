"""Checkpoints of a training: `CheckpointManager`, the coordinators' catalog, and maintenance of a job's checkpoints.

Begin with `manager`.
"""
