"""Simulate kills, power loss and disk faults, and check what must survive them."""
