"""Barriers across replicas: the rounds, and the forwarding of arrivals to peers."""
