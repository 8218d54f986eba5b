"""Copies of committed checkpoints on a further storage tier.

Begin with `tiers`; `copier` carries checkpoints in the background.
"""
