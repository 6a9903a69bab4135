"""Spark imports modules named ``pyspark_*``, so the format ``persisting`` needs no registration."""

from persisting.spark.source import PersistingSource


class DefaultSource(PersistingSource):
    """The data source of the format ``persisting``."""
