"""The training loop: `Run`, the batches of its steps, and the measurements of its steps.

Begin with `run`.
"""
