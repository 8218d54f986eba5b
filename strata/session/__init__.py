"""Sessions: the client side, the serving side (replica to member, agent to rank), and the links that both sides use."""
