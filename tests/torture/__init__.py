"""Random work under random faults, checked against what was acknowledged."""
