"""Copies of committed checkpoints on a further storage tier.

Begin with `tiers`; `copier` copies checkpoints in the background.
"""
