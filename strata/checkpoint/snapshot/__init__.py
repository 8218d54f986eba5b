"""Snapshots: a training's state as a tree of plain values and tensors, copied so that the trainer may go on.

Begin with `state`, then `snapshot`.
"""
