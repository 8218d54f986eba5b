"""`strata controlplane`: backup, restore and rebuild."""
