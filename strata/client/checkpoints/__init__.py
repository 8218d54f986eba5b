"""Checkpoints for a training: `CheckpointManager`, the coordinators' catalog, and the upkeep of a job's checkpoints.

Begin with `manager`.
"""
