"""Barriers across replicas: the rounds, and the links that arrivals are forwarded on."""
