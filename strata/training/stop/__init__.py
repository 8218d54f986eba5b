"""Graceful stop of a run: signals and notices become one last step of all ranks, a save, and an exit.

Begin with `stopper`.
"""
