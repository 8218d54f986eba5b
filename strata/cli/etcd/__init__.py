"""`strata etcd`: the health of etcd's members, and the commands that mend them. Begin with `commands`."""
