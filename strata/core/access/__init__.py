"""Access: which caller may call which RPC, how often, and how many connections and answers may stay open.

Begin with `authority`, the table of every RPC.
"""
