"""Samples: their order, and which rank takes which of them. Needs neither torch nor NumPy."""
