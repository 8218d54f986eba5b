"""The checks of `strata doctor`, one file each: this machine, certificates, storage, the coordinators, etcd.

Each check returns findings, and raises no exceptions.
"""
