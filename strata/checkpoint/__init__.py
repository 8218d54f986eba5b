"""Files: images, manifests, where they lie, and a catalog protocol over them."""
