"""A training that survives: `strata.init`, and the loop around `run.steps`.

This floor stands beside the supervisor: it knows the client library, checkpoints and samplers. It
imports torch only where the program has: a JAX or a NumPy training needs none.
"""
