"""One coordinator replica: a view of the keyspace, leadership, the controllers, and its servers."""
