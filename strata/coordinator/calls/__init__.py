"""What can be asked of a replica, by a session or by a unary call: one table of handlers."""
