"""Level-triggered work: look at the view, do what is missing, wait for the next change.

`committer` runs on every replica; the others run on the leader alone and write through its fence.
"""
