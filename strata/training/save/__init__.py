"""The saves of a run: when one is due, how all ranks meet for it, and what is saved.

Begin with `saves`.
"""
