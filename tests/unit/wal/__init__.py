"""Tests of the log alone: its bytes, appends, recovery and damage."""
