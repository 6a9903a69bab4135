"""Helpers of the Spark tests."""
