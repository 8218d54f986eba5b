"""Access to a replica: authentication, authorisation, rate limits, and how many connections stay open.

Begin with `admission`.
"""
