"""Storage: objects below a root, as local files or in S3.

Begin with `sink`, the protocol; `opening` finds the storage for an address.
"""
