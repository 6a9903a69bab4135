"""Hands files over to a topic as Spark's driver does, without Spark; and points to be killed at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting import fs as filesystem
from persisting.bucket import handover_notes
from persisting.bucket.handover_notes import ADOPT, Note, encoded_schema
from persisting.bucket.shared_schema import FILE as SCHEMA_FILE
from persisting.bucket.shared_schema import SharedSchema
from persisting.queue import QueueWriter
from persisting.records import Rules
from persisting.records.arrow import accept, align
from persisting.store.object_store import ObjectStore
from persisting.table import bulk_write
from persisting.table.bulk_files import BulkFiles
from persisting.topic import handover
from persisting.topic.routing import table_by_bucket
from persisting.topic.spec import TopicConfig, bucket_folder
from persisting.topic.topic_files import TopicFolder
from support.held_process import HeldProcess

COMMON_POINTS = """
from persisting.bucket import bulk_import
from persisting.table import bulk_write
from persisting.topic import handover

held(bulk_import, "check", before="owner-checks")
held(bulk_import, "_commit", before="owner-commits", after="owner-committed")
held(handover, "prepare", after="driver-planned")
held(bulk_write, "write_files", after="driver-wrote-a-file")
"""
"""Points of hand-overs in folders and in object stores."""

POINTS = f"""{COMMON_POINTS}
from persisting.bucket import handover_notes
from persisting.table import bulk_files

held(bulk_files.checksums, "sign", after="owner-wrote-times", when=lambda *a: len(a) == 3)
done = lambda bucket, name, answer, fs: answer.state == "done" and answer.table is None
held(handover_notes, "write_answer", before="owner-answers", after="owner-answered", when=done)
held(handover._HandOver, "_send", before="driver-sends", after="driver-sent",
     when=lambda self, notes: any(note.kind == "adopt" for note in notes.values()))
held(handover, "decide", before="driver-decides", after="driver-decided")
held(handover._HandOver, "_remove", before="driver-has-answers", after="driver-removed-notes",
     when=lambda self, buckets: self._exchange.is_decided())
"""

PUTS = 10_000
"""Owners put records with ids from here on."""

OWNER_POINTS = (
    "owner-checks",
    "owner-commits",
    "owner-wrote-times",
    "owner-committed",
    "owner-answers",
    "owner-answered",
)
DRIVER_POINTS = (
    "driver-planned",
    "driver-wrote-a-file",
    "driver-sends",
    "driver-sent",
    "driver-decides",
    "driver-decided",
    "driver-has-answers",
    "driver-removed-notes",
)

OWNER = """
import asyncio, sys
from persisting.queue import write_queue
from support.handover import put_forever

async def main():
    queue = await write_queue(
        topic=sys.argv[3] if len(sys.argv) > 3 else "t", storage_path=sys.argv[1],
        local_socket=False,
        backend_options={"enable_wal": True, "flush_interval": None, "flush_threshold": 40},
    )
    await put_forever(queue, int(sys.argv[2]), 0.02)

asyncio.run(main())
"""

DRIVER = """
import sys
from pathlib import Path
from support.handover import hand_over, texts

first, count = map(int, sys.argv[2:4])
overwrite = "overwrite" in sys.argv[5:]
topic = Path(sys.argv[1]) / "t"
print(hand_over(topic, texts(first, count), sys.argv[4], overwrite=overwrite), flush=True)
"""


def texts(first: int, count: int) -> list[dict[str, Any]]:
    """Return records with ids from ``first`` on."""
    return [{"id": i, "text": f"row {i}"} for i in range(first, first + count)]


async def put_forever(queue: QueueWriter, number: int, pause: float) -> None:
    """Put records with ids from ``number`` on; print the next id after each put."""
    while True:
        await queue.put_batch(texts(number, 5))
        number += 5
        print(number, flush=True)
        await asyncio.sleep(pause)


def check_ids(
    found: Mapping[int, list[int]], written: int, acknowledged: int, old: int = 0
) -> list[int]:
    """Assert that every row handed over and every acknowledged record is stored once, and that
    each bucket has the records of the owner in order.

    ``found`` are the ids by bucket, ``old`` is how many records the topic had before. Return the
    ids of the owner's records, sorted.
    """
    numbers = sorted(number for some in found.values() for number in some)
    assert numbers == sorted(set(numbers))
    assert [n for n in numbers if n < PUTS - old] == list(range(written))
    own = [n for n in numbers if n >= PUTS]
    assert own[: acknowledged - PUTS] == list(range(PUTS, acknowledged))
    for some in found.values():
        put = [n for n in some if n >= PUTS]
        assert put == sorted(put)
    return own


def hand_over(
    topic: Path,
    records: list[dict[str, Any]],
    write_id: str = "w",
    number: int = 0,
    *,
    seconds: float = 60.0,
    overwrite: bool = False,
    meanwhile: Callable[[], Any] | None = None,
) -> int:
    """Write records as files and have the owners of a topic adopt them; return the new rows.

    ``meanwhile`` is called when the files are written, ``seconds`` is how long to wait then.
    """
    config, notes = written_notes(topic, records, (write_id, number), overwrite=overwrite)
    return adopted(topic, config, notes, seconds, meanwhile)


def adopted(
    topic: Path | ObjectStore,
    config: TopicConfig,
    notes: dict[int, Note],
    seconds: float,
    meanwhile: Callable[[], Any] | None,
) -> int:
    """Have the owners of a topic adopt files; return the new rows."""
    if meanwhile is not None:
        meanwhile()
    return sum(handover.adopt(topic, config, notes, seconds).values())


def leave_notes(
    topic: Path,
    records: list[dict[str, Any]],
    write_id: str = "w",
    *,
    overwrite: bool = False,
    decided: bool = True,
) -> str:
    """Leave the files and notes of a driver that died right after its decision, or right before
    it; return the id."""
    _, notes = written_notes(topic, records, (write_id, 0), overwrite=overwrite)
    return send_and_die(topic, notes, decided=decided)


def send_and_die(topic: Path, notes: dict[int, Note], *, decided: bool = True) -> str:
    """Write notes as a driver that dies after its decision, or before it; return the id."""
    fs = filesystem.current()
    name, lock = handover_notes.hold_lock(topic, fs)
    for bucket, note in notes.items():
        handover_notes.write_note(bucket_folder(topic, bucket), name, note, fs)
    if decided:
        handover.decide(topic, name)
    lock.free()
    return name


def written_notes(
    topic: Path,
    records: list[dict[str, Any]],
    sequence: tuple[str, int] = ("w", 0),
    *,
    overwrite: bool = False,
) -> tuple[TopicConfig, dict[int, Note]]:
    """Write records as files; return the notes that hand them over, by bucket."""
    config = TopicFolder.open(topic).config
    shared = SharedSchema(topic / SCHEMA_FILE, filesystem.current())
    rows = pa.Table.from_pylist(records)
    schema = shared.propose(rows.schema, frozenset(), Rules(evolving=True))
    tables = handover.prepare(topic, config, schema)
    files = {
        bucket: BulkFiles(bucket_folder(topic, bucket) / "data.lance", filesystem.current())
        for bucket in range(config.num_buckets)
    }
    return config, files_for(files, config, rows, schema, tables, sequence, overwrite)


def files_for(
    files: Mapping[int, BulkFiles],
    config: TopicConfig,
    rows: pa.Table,
    schema: pa.Schema,
    tables: dict[int, dict[str, Any]],
    sequence: tuple[str, int],
    overwrite: bool,
) -> dict[int, Note]:
    """Write the files of rows for their buckets; return the notes that hand them over."""
    notes = {}
    for bucket, part in table_by_bucket(rows, config.bucket_column, config.num_buckets).items():
        batches = [align(batch, schema, None) for batch in accept(part, schema).to_batches()]
        version = tables[bucket]["version"]
        fragments = bulk_write.write_files(files[bucket], version, batches, schema)
        notes[bucket] = Note(
            kind=ADOPT,
            writer=sequence[0],
            number=sequence[1],
            replace=overwrite,
            rows=part.num_rows,
            fragments=fragments,
            columns=[tables[bucket]["columns"]],
            schema=encoded_schema(schema),
        )
    return notes


def held_process(folder: Path, code: str, *args: object, hold: str = "") -> HeldProcess:
    """Run an owner or a driver that waits at the point ``hold``."""
    return HeldProcess(folder, code, *args, points=POINTS, hold=hold)


def files_of_handovers(topic: Path) -> list[str]:
    """Return what hand-overs have left in the folders of a topic, without the drafts of processes
    that were killed while they wrote a file: those are removed when they are old."""
    paths = (path for path in topic.rglob("handover/*") if path.suffix != filesystem.DRAFT)
    return sorted(str(path.relative_to(topic)) for path in paths)
