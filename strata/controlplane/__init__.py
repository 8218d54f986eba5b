"""Backup and restore of the control plane: the work of `strata controlplane`, without its options and its output.

A backup is one etcd member's snapshot and a small document that describes it, in a folder or below a prefix of S3.
This package requests the snapshot from etcd, stores it, rotates old backups, lists and verifies them. It may import
`strata.etcd`, `strata.checkpoint` (for S3) and the packages below them; `strata.cli` alone imports it.

Files by concept: `names` (of files), `metadata` (the document), `snapshot` (etcd's own checksum), `places`
(folder, S3), `source` (the member that gives the snapshot), `backup` (the steps of a backup), `record` (`P/backup`),
`backup_store` (listing, verifying, rotation). For a restore: `storage_search` (the checkpoints that storage
roots prove), `restoring` (the keys from which a restore starts), `rewriting` (how the keys are written).
Decisions are in `core.restore.backup_source`, `core.restore.backup_rotation` and `core.restore.control_plane`.
"""
