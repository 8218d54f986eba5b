"""Datasets: which member owns which shard, by consistent hashing (PROTOCOLS 7.1).

Begin with `ring`.
"""
