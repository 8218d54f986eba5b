"""Generations: when one ends, which members train in the next, as which ranks, from which checkpoint (PROTOCOLS 6.1).

Begin with `planning`; `changes` decides whether and why a generation ends.
"""
