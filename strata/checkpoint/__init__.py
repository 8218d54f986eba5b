"""Checkpoint files: images and manifests, their storage, and the protocol of a catalog over them."""
