"""`strata etcd`: the health of etcd's members, and the commands that repair them. Begin with `commands`."""
