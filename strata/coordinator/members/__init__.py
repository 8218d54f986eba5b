"""The members that this replica serves: their sessions, registration and failure detection."""
