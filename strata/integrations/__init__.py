"""Adapters of Strata to other frameworks, one package each; a framework is imported only when its adapter is used."""
