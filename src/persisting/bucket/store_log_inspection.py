"""Inspects the logs of a topic in an object store. Blocking, changes nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from persisting.bucket.log_inspection import (
    LoggedBucketReport,
    OwnerLogReport,
    SequenceOf,
    read_report,
)
from persisting.bucket.slot_files import SlotFiles
from persisting.bucket.store_groups import journals_in
from persisting.bucket.store_ownership import FREE, owner_register
from persisting.errors import WALError
from persisting.store.object_store import ObjectStore
from persisting.wal import sealing
from persisting.wal.frame import Broken, decode_segment_header
from persisting.wal.lease import LeaseRecord, lease_register
from persisting.wal.slots import (
    LOGS,
    broken_slot,
    check_slot,
    first_free,
    is_claim,
    is_log_name,
    slot_key,
    slot_of,
    slots_prefix,
)

_TRIES = 5
_ADVICE = ". Restore it from a copy or from an older version of the object"


def inspect_store_logs(
    store: ObjectStore, num_buckets: int, sequence_of: SequenceOf
) -> list[OwnerLogReport]:
    """Inspect all logs with records, and those that are noted and missing; no journals of work
    groups, which are stored beside them.

    Owners may be writing: objects may disappear, whose records are in the tables.
    """
    journals = journals_in(store)
    listed = {key.split("/")[1] for key in store.list(LOGS)}
    names = {name for name in listed if is_log_name(name)} - journals
    noting: dict[str, list[int]] = {name: [] for name in names}
    for bucket in range(num_buckets):
        held = owner_register(store, bucket).read()
        if held is not None and held.content.log != FREE:
            noting.setdefault(held.content.log, []).append(bucket)
    reports = {}
    for name in sorted(noting):
        report = _inspect(store, name, noting[name], sequence_of)
        if report is not None:
            reports[name] = report
    if any(not noting[name] for name in reports):
        # A keeper may have begun since. It is named before it writes.
        for name in journals_in(store) & reports.keys():
            del reports[name]
    return list(reports.values())


def _inspect(
    store: ObjectStore, name: str, noting: list[int], sequence_of: SequenceOf
) -> OwnerLogReport | None:
    """Inspect one log; None if nothing is in it and no bucket needs it."""
    report = None
    for _ in range(_TRIES):
        keys = store.list(slots_prefix(name))
        lease = lease_register(store, name).read()
        if lease is None:
            return _without_lease(store, name, noting, sequence_of)
        sequences = {bucket: sequence_of(bucket) for bucket in noting}
        contents = _contents(store, name, keys, lease.content)
        if not noting and not any(contents.values()):
            return None  # a claim, which stays for good
        report = _report(store, name, contents, sequences, sequence_of)
        report.owner, report.owned = _owner(lease.content), not lease.content.taken_by
        if report.state != "damaged":
            return report
        # The owner may have flushed and released objects while they were read.
    return report


def _contents(
    store: ObjectStore, name: str, keys: list[str], lease: LeaseRecord
) -> dict[int, bytes | None]:
    """Return the group commits after the released ones; None for one that is missing.

    What the owner is storing after a free slot does not count.
    """
    used = {slot_of(key) for key in keys}
    free = first_free(used, lease.released + 1)
    found: dict[int, bytes | None] = {}
    before = lease.released_through
    for slot in range(lease.released + 1, free):
        one = store.get(slot_key(name, slot))
        if one is not None and is_claim(one.data):
            return found
        found[slot] = None if one is None else one.data
        if one is not None:
            with suppress(WALError):  # the report says what is damaged
                before = check_slot(one.data, name).last
    try:
        behind = sorted(slot for slot in used if slot > free)
        sealing.check_nothing_is_missing(store, name, free, before, behind)
    except WALError:
        found[free] = None
    return found


def _report(
    store: ObjectStore,
    name: str,
    contents: dict[int, bytes | None],
    sequences: dict[int, int],
    sequence_of: SequenceOf,
) -> OwnerLogReport:
    place = Path(str(store.address / slots_prefix(name)))
    damage, readable = None, []
    for slot, data in contents.items():
        at = str(store.address / slot_key(name, slot))
        if data is None:
            damage = damage or f"the log object {at} is missing"
            continue
        # An object is stored whole or not at all: what looks like a torn tail is damage.
        broken = broken_slot(data)
        if broken is not None:
            damage = damage or f"the log object {at} is damaged: {broken}"
        if _has_header(data):
            readable.append(data)
    report = read_report(place, sequences, sequence_of, SlotFiles(place, readable))
    damage = damage or report.damage
    if damage is not None:
        report.state, report.damage, report.problem = "damaged", damage, damage + _ADVICE
    return report


def _has_header(data: bytes) -> bool:
    try:
        decode_segment_header(memoryview(data))
    except Broken:
        return False
    return True


def _without_lease(
    store: ObjectStore, name: str, noting: list[int], sequence_of: SequenceOf
) -> OwnerLogReport | None:
    still = []
    for bucket in noting:
        held = owner_register(store, bucket).read()
        if held is not None and held.content.log == name:
            still.append(LoggedBucketReport(bucket, True, sequence_of(bucket)))
    if not still:
        return None  # closed meanwhile
    damage = (
        f"the lease of the log {store.address / slots_prefix(name)} is missing, and the log may "
        "hold acknowledged records"
    )
    return OwnerLogReport(
        Path(str(store.address / slots_prefix(name))),
        "missing",
        problem=damage + _ADVICE,
        damage=damage,
        buckets=still,
    )


def _owner(lease: LeaseRecord) -> dict[str, Any]:
    return {"pid": lease.owner.pid, "host": lease.owner.host}
