"""Access to a replica: who calls, whether they may, how often, and how many connections stay open.

Begin with `admission`.
"""
