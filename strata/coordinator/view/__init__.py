"""What this replica knows of the keyspace: the mirror of etcd, and what is relayed of it."""
