"""The format on storage: images, manifests, digests, and the COMMIT marker.

Begin with `manifest`, then `marker`.
"""
