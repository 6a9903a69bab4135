"""The topics of an object store, for the catalog: its Java has no client of the store.

A data source answers a catalog only with a schema, so the names are those of fields.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import NullType, StructField, StructType

from persisting.spark.source_options import LIST_TOPICS
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import inspect, store_config, store_inspect
from persisting.topic.topic_names import check_name


def listed_topics(options: Mapping[str, str]) -> StructType:
    """Return a field for each topic at ``path``, or only for ``topic`` if it exists.

    The option ``listTopics`` is ``all`` or ``filled``: only topics with records, in a table or in a
    log.
    """
    given = {name.lower(): value for name, value in options.items()}
    root = given["path"]
    topic = given.get("topic")
    names = store_inspect.topic_names(root) if topic is None else _existing(topic, root)
    if given[LIST_TOPICS.lower()] == "filled":
        names = [name for name in names if _has_records(name, root)]
    return StructType([StructField(name, NullType()) for name in names])


def _existing(name: str, root: str) -> list[str]:
    store = open_store(parse(root) / check_name("topic", name), StorageOptions())
    return [] if store_config.load(store) is None else [name]


def _has_records(name: str, root: str) -> bool:
    """Whether a topic has records; one that cannot be read may have some."""
    seen = inspect.store_topic_overview(name, root)
    found = any(bucket.rows or bucket.log_bytes for bucket in seen.buckets)
    return found or bool(seen.facts.problem)
