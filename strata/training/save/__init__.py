"""The saves of a run: their cadence, the barrier of all ranks, and the saved state.

Begin with `saves`.
"""
