"""What `strata doctor` looks at, a file each: this machine, certificates, storage, the coordinators, etcd.

Each check returns findings, and raises for none of them.
"""
