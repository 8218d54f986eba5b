"""Adapters of Strata to other frameworks: one package each, which imports its framework only when it is used."""
