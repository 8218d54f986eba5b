"""Snapshots: the state as a tree of plain values and tensors, copied so that the trainer may change it.

Begin with `state`, then `snapshot`.
"""
