"""Generated from proto/strata/etcdapi by scripts/gen-proto; do not edit."""
