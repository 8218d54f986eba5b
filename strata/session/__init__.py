"""Sessions: their opening side, their serving side (replica to member, agent to rank), and the links under them."""
