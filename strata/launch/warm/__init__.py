"""Warm starts: interpreters that have done a script's large imports and wait to become a rank.

Begin with `starting`; `warm_pool` manages the processes, and `warm_program` is the program they run.
"""
