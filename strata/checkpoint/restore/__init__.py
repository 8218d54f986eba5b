"""Restoring: every byte is proven before any is handed out.

Begin with `reader`, then `restore`. `verify` and `diff` read without restoring.
"""
