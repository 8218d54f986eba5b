"""Samplers: the order of samples, and their division among ranks. Needs neither torch nor NumPy."""
