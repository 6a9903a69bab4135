"""Random work under random faults, and a checker that knows what was acknowledged."""
