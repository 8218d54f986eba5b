"""`strata top`: the jobs of a cluster and the progress of each, live on a terminal."""
