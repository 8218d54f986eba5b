"""The training loop: `Run`, the batches of its steps, and what is measured of them.

Begin with `run`.
"""
