"""The API for callers that are not ranks: `CoordinatorClient`, datasets, shards and watches.

Begin with `coordinator`.
"""
