"""Programs that use Strata as its users do, and record what they did and what they were told."""
