"""Access to a replica: authentication, authorisation, rate limits and connection limits.

Begin with `admission`.
"""
