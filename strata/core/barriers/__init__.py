"""Barriers: the arrivals of ranks at a round, and the single commit that ends a round (PROTOCOLS 6.2 to 6.6).

Begin with `outcomes`.
"""
