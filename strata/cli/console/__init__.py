"""Code that commands share: options for credentials, tables and JSON, progress, exit codes, completion."""
