"""Spark imports modules named ``pyspark_*``, so the format ``persisting`` needs no registration."""

from persisting.spark.data_source import PersistingSource


class DefaultSource(PersistingSource):
    """The data source of the format ``persisting``."""
