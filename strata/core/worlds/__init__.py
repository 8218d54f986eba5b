"""Generations: when one ends, who trains in the next, as which ranks, and from which checkpoint (PROTOCOLS 5).

Begin with `planning`; `changes` holds the judgement behind it.
"""
