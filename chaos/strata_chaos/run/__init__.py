"""One run: its programs, the site that it breaks, and the folder that it records. Begin with `runner`."""
