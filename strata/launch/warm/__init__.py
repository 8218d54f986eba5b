"""Warm starts: interpreters that have done a script's large imports and wait to become a rank.

Begin with `starting`; `warm_pool` keeps the processes, `warm_program` is what they run.
"""
