"""The queue contract for a topic that another process owns."""

from __future__ import annotations

from support.queue_contract import (
    FindingContract,
    GroupContract,
    OnceContract,
    ReadingContract,
    SchemaContract,
    WritingContract,
)


class TestWriting(WritingContract):
    pass


class TestReading(ReadingContract):
    pass


class TestFinding(FindingContract):
    pass


class TestSchema(SchemaContract):
    pass


class TestGroups(GroupContract):
    pass


class TestOnce(OnceContract):
    pass
