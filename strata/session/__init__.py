"""Serving a session, whoever serves it: a replica its members, a supervisor its ranks."""
