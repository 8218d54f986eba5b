"""The API for everything that is no rank: `CoordinatorClient`, datasets, shards and watches.

Begin with `coordinator`.
"""
