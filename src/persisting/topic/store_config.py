"""The definition of a topic in an object store: ``topic.json``, changed by compare-and-swap."""

from __future__ import annotations

import msgspec

from persisting.backends.persisting import PersistingBackend
from persisting.bucket.store_ownership import REMOVED
from persisting.bucket.store_schema import StoreSchema
from persisting.errors import InvalidArgument, NoSuchTopic, SchemaError, StorageError
from persisting.records import EMPTY, Rules
from persisting.records.arrow import check_defaults
from persisting.store.object_store import ObjectStore, StoredObject
from persisting.store.register import Held, Register, has_nonce
from persisting.topic import spec as topics
from persisting.topic.spec import TopicConfig, TopicSpec

BACKEND = "persisting"
DELETED = "deleted"
"""The backend of a topic whose deletion has begun."""


class _Definition(Register[TopicConfig]):
    """The definition; a file that another program has uploaded does not count."""

    def decode(self, found: StoredObject) -> Held[TopicConfig]:
        held = super().decode(found)
        if not has_nonce(found):
            raise StorageError(
                f"{self.place} was uploaded from a folder, and the files of a topic in a folder "
                "are not a topic in an object store; copy a topic with 'persisting backup'"
            )
        return held


def register(store: ObjectStore) -> Register[TopicConfig]:
    return _Definition(store, topics.FILE, TopicConfig, topics.FORMAT)


def load(store: ObjectStore) -> TopicConfig | None:
    """Return the configuration of the topic, None if there is no topic. Blocking."""
    config = load_any(store)
    if config is not None:
        _check_not_deleted(config, store)
    return config


def load_any(store: ObjectStore) -> TopicConfig | None:
    """Like :func:`load`, but load a topic whose deletion was interrupted too. Blocking."""
    held = register(store).read()
    return None if held is None else _unless_removed(held.content)


def _unless_removed(config: TopicConfig | None) -> TopicConfig | None:
    return None if config is None or config.backend == REMOVED else config


def mark_deleted(store: ObjectStore) -> None:
    """Mark the topic, so that it can no longer be opened."""

    def change(stored: TopicConfig | None) -> TopicConfig:
        stored = _unless_removed(stored)
        if stored is None:
            raise NoSuchTopic(f"topic {store.address.name!r} no longer exists")
        return msgspec.structs.replace(stored, backend=DELETED)

    register(store).update(change)


def mark_removed(store: ObjectStore) -> None:
    """End a deletion: the topic no longer exists. A new one replaces the object by its version."""

    def change(stored: TopicConfig | None) -> TopicConfig:
        if stored is None:
            raise StorageError(f"{store.address / topics.FILE} was deleted meanwhile")
        if stored.backend != DELETED:
            return stored  # marked by a swap whose answer was lost, or already a new topic
        return msgspec.structs.replace(stored, backend=REMOVED, options={})

    register(store).update(change)


def _check_not_deleted(config: TopicConfig, store: ObjectStore) -> None:
    if config.backend == DELETED:
        raise StorageError(
            f"the deletion of topic {config.topic!r} at {store.address.parent} was interrupted; "
            "complete it with 'persisting delete'"
        )


def agreed(spec: TopicSpec, store: ObjectStore) -> tuple[TopicConfig, bool]:
    """Return the topic's configuration after applying ``spec``, and whether an existing topic has
    changed. Blocking.

    The topic is created, or its object changed, where needed.
    """
    before: list[TopicConfig | None] = []

    def change(stored: TopicConfig | None) -> TopicConfig:
        stored = _unless_removed(stored)
        before.append(stored)
        if stored is None:
            _check_backend(spec, store)
            config = spec.new()
        else:
            _check_not_deleted(stored, store)
            config = spec.applied_to(stored)
        topics.refuse_opener_options(spec.options or {})
        PersistingBackend.check_options(
            batch_size=config.batch_size, storage_path=store.address, **config.options
        )
        _check_defaults(spec, store)
        topics.check_storable(config)
        return config

    config = register(store).update(change)
    if before[0] is not None:
        topics.warn_of_changes(before[0], config)
    return config, before[-1] not in (None, config)


def _check_backend(spec: TopicSpec, store: ObjectStore) -> None:
    if spec.backend == BACKEND:
        return
    if spec.backend in (None, "memory"):
        raise InvalidArgument(
            f"a new topic at {store.address} needs durable=True, or backend='persisting' with "
            "enable_wal=True"
        )
    raise InvalidArgument(
        f"the backend {spec.backend!r} cannot store a topic at {store.address}; in an object store "
        "use backend='persisting' with enable_wal=True, or durable=True"
    )


def _check_defaults(spec: TopicSpec, store: ObjectStore) -> None:
    """Raise for defaults that contradict the topic's fields, before they are stored."""
    defaults = (spec.options or {}).get("schema_defaults")
    if not defaults:
        return
    try:
        schema = StoreSchema(store).read() or EMPTY
        check_defaults(schema, Rules(evolving=True, defaults=defaults))
    except SchemaError as exc:
        raise InvalidArgument(
            f"schema_defaults: {exc}; give a default of the field's type"
        ) from exc
