"""Saving: from a snapshot to the marker, and which rank writes which bytes.

Begin with `writer` (the trainer's side), then `saver` (one rank's way through one save).
"""
