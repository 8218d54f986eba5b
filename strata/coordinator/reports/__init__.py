"""What ranks and members report, held for whoever looks."""
