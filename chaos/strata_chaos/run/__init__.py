"""One run: the programs that it starts, the site that it breaks, and the folder that it records. Begin with `runner`."""
