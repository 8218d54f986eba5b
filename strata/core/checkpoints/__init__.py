"""The checkpoint catalog: begin, ack, seal, commit, copies, pins, deletion and retention (PROTOCOLS 8).

Begin with `lifecycle`; an attempt at a save is in `attempt`, and its opening in `begin`.
"""
