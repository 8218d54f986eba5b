"""Child processes that never outlive their parent, however it ends.

Begin with `children`. It imports nothing of Strata.
"""
