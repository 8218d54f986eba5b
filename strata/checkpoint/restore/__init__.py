"""Restoring: every byte is verified before any is returned.

Begin with `reader`, then `restore`. `verify` and `diff` read without restoring; `whole_diff` and `element_diff` compare
checkpoints of two trainings.
"""
