"""What each RPC does: decode, one call, encode."""
