"""Stopping together: notices, stop requests, the last step that all ranks agree on, and held saves (PROTOCOLS 6.1).

Begin with `last_step`.
"""
