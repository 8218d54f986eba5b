"""Generated from proto/strata/v1 by scripts/gen-proto; do not edit."""
