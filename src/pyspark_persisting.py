"""Spark looks for modules of this name: the format ``persisting`` needs no registration."""

from persisting.spark.data_source import PersistingSource


class DefaultSource(PersistingSource):
    """The data source of the format ``persisting``."""
