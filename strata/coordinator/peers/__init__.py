"""Links between replicas, and which peers are ready."""
