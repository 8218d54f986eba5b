"""Access: who may call which RPC, how often, and how many connections and answers may be held open.

Begin with `authority`, the table of every RPC.
"""
