"""Level-triggered controllers: read the view, do the missing work, wait for the next change.

`committer` runs on every replica; the others run on the leader alone and write through its fence.
"""
