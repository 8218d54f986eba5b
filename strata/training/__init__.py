"""Fault-tolerant training: `strata.init`, and the training loop around `run.steps`.

This package runs in rank processes, on top of the client library, checkpoints and samplers. It imports torch only if
the program has imported it: a JAX or a NumPy training needs no torch.
"""
