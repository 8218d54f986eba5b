"""Judges: each says of one part of the protocols whether a recorded run kept it."""
