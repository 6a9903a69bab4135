"""The schema against which new records are checked, shared by the buckets of one log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pyarrow as pa

from persisting.bucket.chunk import Prepared
from persisting.bucket.shared_schema import SharedSchema
from persisting.errors import SchemaError
from persisting.records import EMPTY, RecordEncoder, Rules
from persisting.records.arrow import merge
from persisting.table.view import TableView

log = logging.getLogger("persisting")

EVOLVING = Rules(evolving=True)


class SchemaState:
    """The encoder of the next records, and the encoder of the last acknowledged ones.

    They differ while the first records of a new schema are on their way to the log. ``lock`` guards
    this object and the buffers of all buckets that share it. It is held briefly, never during I/O,
    calls of Lance or conversions.
    """

    def __init__(self, rules: Rules, shared: SharedSchema | None) -> None:
        self.lock = threading.Lock()
        self.rules, self._shared = rules, shared
        self.encoder = self.acknowledged = RecordEncoder(EMPTY, rules, defined=False)
        self._large_int_fields: set[str] = set()
        self.vector_fields: set[str] = set()
        """Fields that are known to hold enough vectors to keep them searchable."""

    # Opening

    def encoder_for(
        self, view: TableView, topic_schema: Callable[[], pa.Schema | None] | None = None
    ) -> RecordEncoder:
        """Return an encoder for a table and the schema of its topic, which ``topic_schema`` reads.
        Blocking."""
        # A table in an object store exists before its first record.
        schema, defined = view.schema, view.dataset is not None and bool(view.schema or view.rows)
        shared = (topic_schema or self.topic_schema)()
        if shared is not None:
            schema, defined = merge(shared, schema, EVOLVING), True
        return RecordEncoder(schema, self.rules, defined=defined)

    def topic_schema(self) -> pa.Schema | None:
        """Return the schema that all buckets of the topic agreed on, if there is one. Blocking."""
        return self._shared.read() if self._shared is not None else None

    def include(self, encoder: RecordEncoder) -> None:
        """Check later records against the schema of a bucket that was opened, too."""
        with self.lock:
            if not encoder.defined:
                return
            if not self.encoder.defined:
                self.encoder = self.acknowledged = encoder
                return
            self.acknowledged, before = self._merged(self.acknowledged, encoder), self.acknowledged
            self.encoder = (
                self.acknowledged if self.encoder is before else self._merged(self.encoder, encoder)
            )

    def restored(self, encoder: RecordEncoder) -> None:
        """Take over the schema of a restored table, unless it is one of several in a topic.

        Call with ``lock`` held.
        """
        if self._shared is None:
            self.encoder = self.acknowledged = encoder
            self._large_int_fields = set()
        self.vector_fields = set()

    def _merged(self, encoder: RecordEncoder, other: RecordEncoder) -> RecordEncoder:
        schema = merge(encoder.schema, other.schema, EVOLVING)
        if encoder.defined and schema.equals(encoder.schema):
            return encoder
        return RecordEncoder(schema, self.rules)

    # Changing

    def must_propose(self, prepared: Prepared) -> bool:
        """Whether the topic must agree before these records are accepted."""
        if self._shared is None:
            return False
        return prepared.encoder is not prepared.base or not prepared.large <= self._large_int_fields

    def propose(self, prepared: Prepared) -> bool:
        """Propose a changed schema to the topic; False if the topic's schema now has more.

        Blocking.
        """
        if self._shared is None:
            return True
        schema = self._shared.propose(prepared.encoder.schema, prepared.large, self.rules)
        if schema.equals(prepared.encoder.schema):
            return True
        with self.lock:
            merged = merge(self.encoder.schema, schema, EVOLVING)
            self.encoder = RecordEncoder(merged, self.rules)
        return False

    def add_large_int_fields(self, names: set[str]) -> None:
        """Note fields with whole numbers that a float cannot hold. Call with ``lock`` held."""
        self._large_int_fields |= names

    def change(self, prepared: Prepared, place: object) -> None:
        """Check later records against the schema of these. Call with ``lock`` held.

        Raise if a field becomes float and holds whole numbers that a float cannot represent.
        """
        for name in prepared.widened:
            if name in self._large_int_fields:
                raise SchemaError(
                    f"field {name!r} cannot change from int to float: it holds whole numbers "
                    "beyond 2**53, which a float cannot hold; put the floats into another field"
                )
        self._large_int_fields |= prepared.large
        for name in prepared.unsearchable:
            self.vector_fields.discard(name)
            log.warning(
                "field %r of %s held vectors of one length and now takes lists of any length: it "
                "can no longer be searched",
                name,
                place,
            )
        self.encoder = prepared.encoder

    def acknowledge(self, encoder: RecordEncoder) -> None:
        """Note the schema of acknowledged records. Call with ``lock`` held."""
        before, self.acknowledged = self.acknowledged, encoder
        if self.encoder is before:
            # Later puts failed and rolled the schema back while these were written.
            self.encoder = encoder

    def roll_back(self) -> None:
        """Forget the schema of puts that were not acknowledged. Call with ``lock`` held."""
        self.encoder = self.acknowledged

    def merge_table_schema(self, schema: pa.Schema) -> None:
        """Merge the schema of records that were written to a table past the buffer.

        Call with ``lock`` held.
        """
        merged = merge(self.acknowledged.schema, schema, EVOLVING)
        self.acknowledged = RecordEncoder(merged, self.rules)
        self.encoder = RecordEncoder(merge(self.encoder.schema, merged, EVOLVING), self.rules)
