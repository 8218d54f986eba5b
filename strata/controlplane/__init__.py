"""Backups of the control plane and its restore: what `strata controlplane` does, without its options and its output.

A backup is one etcd member's snapshot and a small document that describes it, in a folder or below a
prefix of S3. This package asks etcd for it, keeps it, rotates old ones, lists and verifies them. It may
import `strata.etcd`, `strata.checkpoint` (for S3) and what lies below; `strata.cli` alone imports it.

Files by concept: `names` (of files), `metadata` (the document), `snapshot` (etcd's own checksum),
`places` (folder, S3), `source` (the member that gives the snapshot), `backup` (the whole of one), `record`
(`P/backup`), `shelf` (listing, verifying, rotation); for a restore `storage_search` (what storage roots prove),
`restoring` (what it begins with), `rewriting` (how the keys are written). Decisions are in `core.restore.backup_source`,
`core.restore.backup_rotation` and `core.restore.control_plane`.
"""
