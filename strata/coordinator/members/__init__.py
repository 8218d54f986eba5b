"""The members that this replica serves: their sessions, their registration, their deaths."""
