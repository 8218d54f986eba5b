"""Documents that somebody else may have written: bounded before they are read, and before they are parsed."""
