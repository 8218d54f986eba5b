"""The replica's copy of the keyspace: the mirror of etcd, its recent history, and the ranks' index."""
