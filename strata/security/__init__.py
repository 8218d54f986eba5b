"""Certificates and tokens in files, and diagnosis of failed TLS handshakes."""
