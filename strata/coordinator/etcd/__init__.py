"""A replica's own look at etcd: version, members, and whether it takes writes."""
