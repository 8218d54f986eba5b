"""Links between replicas, and which of them are ready."""
