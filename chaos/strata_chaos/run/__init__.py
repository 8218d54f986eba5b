"""One run: its programs, the system that its faults break, and its folder. Begin with `runner`."""
