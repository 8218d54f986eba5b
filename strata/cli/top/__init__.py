"""`strata top`: the jobs of a cluster and how each of them goes, live on a terminal."""
