"""Child processes that never outlive their parent, however it ends.

Begin with `children`. The package imports no other package of Strata.
"""
