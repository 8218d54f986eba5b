"""Strata inside other people's programs: one folder for each, which imports theirs only when it is used."""
