"""Saving: from a snapshot of the state to the commit marker, and which rank writes which bytes.

Begin with `writer` (the trainer's side), then read `saver` (the steps of one rank in one save).
"""
