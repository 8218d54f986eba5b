"""Bounded reading and parsing of documents that another program or user may have written."""
