"""The calls that a replica answers, on a session or as unary calls: one table of methods."""
