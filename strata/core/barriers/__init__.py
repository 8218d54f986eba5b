"""Barriers: who has arrived at which round, and the one commit that ends a round (PROTOCOLS 6.2 to 6.6).

Begin with `outcomes`.
"""
