"""What a topic must hold, from the notes of the processes that worked on it.

A look settles what could not be known before: in which order puts of several producers came, and
what became of a step that failed or was cut short.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from support.crash.checking import Broken, same

from persisting.topic.routing import bucket_of
from torture.plan import Round
from torture.records import WORDS, Record
from torture.retaining import Retention
from torture.shelf import Base, Put, Shelf, Span, difference

Note = dict[str, Any]
Spans = dict[int, tuple[int, int]]
"""By bucket, the offset of the first row and the one after the last."""

FLUSHING = {"flush", "compact", "retain", "tag", "tag beside", "restore", "create_index", "close"}
"""What was acknowledged before one of these begins survives a crash once it is done."""


class Ledger:
    """Follows the notes of one topic over all its rounds."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self.records: dict[str, Record] = {}
        self.shelves = {bucket: Shelf() for bucket in range(num_buckets)}
        self.tags: dict[str, dict[int, Span]] = {}
        self.delivered: set[str] = set()
        self.committed: dict[int, int] = {}
        self._committing: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        """By bucket, below which offset rows may be passed over: those that a group had committed
        were lost, and others came in their place."""
        self.leaks: dict[str, str] = {}
        """Errors that are none of ours, by the place where they were raised."""
        self.backups: dict[str, Spans] = {}
        """By name, how many ids of each bucket it must hold, and from which offset."""
        self._unsure: Note | None = None
        self._beside: tuple[str, Spans, bool] | None = None
        """A tag that was made beside puts: what it must hold at least, and whether it is done."""
        self._round = 0
        self._logged = True
        self._notes = 0
        self._retention = Retention()
        self._puts: dict[tuple[int, int], list[Put]] = {}
        self._making: dict[str, Spans] = {}
        self._flushing: dict[str, list[tuple[Shelf, int, list[Put]]]] = {}
        """By step, what it is to flush: of each bucket all before an offset, and these puts."""

    def begin_round(self, round_: Round) -> None:
        self._round, self._logged = round_.number, round_.logged
        self._retention.begin_round(round_.options)

    def follow(self, note: Note) -> None:
        """Take a note in; raises where it says what must not be."""
        self._notes += 1
        self._retention.now = max(self._retention.now, note.get("at", 0.0))
        if "crashed" in note:
            raise Broken(f"the process raised {note['crashed']}\n{note['trace']}")
        if "leaked" in note:
            self.leaks.setdefault(_raised_in(note["trace"]), note["trace"])
        elif "records" in note:
            self._about_to_put(note)
        elif "begin" in note:
            self._begun(note)
        elif "done" in note:
            self._done(note)
        elif "failed" in note:
            self._failed(note)
        elif "look" in note:
            self.settle(_looked(note["look"]), _spans(note["look"]["tags"]))
            self._retention.now = note.get("at", 0.0)
        elif "asked" in note:
            self._answered(note)
        elif "got" in note:
            self._got(note)
        elif "told" in note:
            self._told(_by_bucket(note["told"]), _by_bucket(note["starts"]))
        elif "commit" in note:
            self._committing = _by_bucket(note["commit"])
            self._retention.may_commit(self._committing)
        elif "committed" in note:
            self.committed |= _by_bucket(note["committed"])
            self._committing = {}
        elif "verified" in note:
            if not note["verified"]["ok"]:
                raise Broken(f"verify: {note['verified']}")

    def _about_to_put(self, note: Note) -> None:
        key = (self._round, note["put"])
        parts: dict[int, list[str]] = {}
        for record in note["records"]:
            self.records[record["id"]] = record
            self._retention.put_at[record["id"]] = note.get("at", 0.0)
            parts.setdefault(bucket_of(record["id"], self.num_buckets), []).append(record["id"])
        self._puts[key] = [
            Put(key, note["producer"], ids, begun=self._notes) for ids in parts.values()
        ]
        for bucket, put in zip(parts, self._puts[key], strict=True):
            self.shelves[bucket].puts.append(put)

    def _begun(self, note: Note) -> None:
        what = note["begin"]
        if what in FLUSHING:
            self._flushing[what] = [
                (shelf, shelf.end, shelf.acknowledged) for shelf in self.shelves.values()
            ]
        if what in ("tag", "delete_tag", "restore", "retain"):
            self._unsure = note
        elif what == "backup":
            self._making[note["name"]] = self._floors(logged=self._logged)
        elif what == "tag beside":
            self._beside = (note["name"], self._floors(), False)
        if what in ("tag", "delete_tag", "tag beside"):
            self._retention.tags.pop(note["name"], None)
        elif what == "retain":
            self._retention.asked = note["rows"]

    def _failed(self, note: Note) -> None:
        self._flushing.pop(note["failed"], None)
        if note["failed"] == "backup":
            self._making.pop(note["name"], None)

    def _floors(self, *, logged: bool = True) -> Spans:
        return {
            bucket: (shelf.start, shelf.safe_end(logged=logged))
            for bucket, shelf in self.shelves.items()
        }

    def _done(self, note: Note) -> None:
        what = note["done"]
        for shelf, end, puts in self._flushing.pop(what, ()):
            shelf.flushed = max(shelf.flushed, end)
            for put in puts:
                put.flushed = True
        if what == "put":
            for put in self._puts[self._round, note["put"]]:
                put.acknowledged = self._notes
        elif what == "backup":
            self.backups[note["name"]] = self._making.pop(note["name"])
        elif what == "tag beside":
            assert self._beside is not None
            self._beside = (*self._beside[:2], True)
        elif what == "tag":
            self.tags[note["name"]] = self._tagged(note["name"], _span(note["result"]))
        elif what == "delete_tag":
            del self.tags[note["name"]]
        elif what == "retain":
            for bucket, start in _by_bucket(note["result"]["start_offsets"]).items():
                self._retained(bucket, start, note["rows"])
            self._retention.asked = None
        elif what == "restore":
            for bucket, span in self.tags[note["name"]].items():
                shelf = self.shelves[bucket]
                shelf.start, shelf.ids = span[0], list(span[1])
                shelf.flushed = shelf.end
            self.committed.clear()
        if what in ("tag", "delete_tag", "retain", "restore"):
            self._unsure = None

    def _retained(self, bucket: int, start: int, rows: int) -> None:
        shelf = self.shelves[bucket]
        if not self._may_begin(bucket, start, shelf.base, shelf.end):
            raise Broken(f"retain({rows}) left {start} of {shelf.start, shelf.end}")
        self._dropped(bucket, start)
        shelf.start, shelf.ids = start, shelf.ids[start - shelf.start :]

    def _dropped(self, bucket: int, start: int) -> None:
        """Whoever had not come so far was told, and a restore may bring them back."""
        shelf = self.shelves[bucket]
        self.delivered.update(shelf.ids[: max(0, start - shelf.start)])

    def _may_begin(self, bucket: int, start: int, base: Base, end: int) -> bool:
        """Whether retention may have made ``base`` begin at ``start``, now that it ends there."""
        if start <= base.start:
            return start == base.start
        left = base.from_(start)
        gone = base.ids[: len(base.ids) - len(left.ids)]
        return self._retention.allows(bucket, start, end, gone + self._oldest(bucket, left.unseen))

    def _oldest(self, bucket: int, count: int) -> list[str]:
        """Of what was put and not seen since."""
        unseen = [name for put in self.shelves[bucket].puts for name in put.ids]
        return sorted(unseen, key=self._retention.put_at.__getitem__)[:count]

    def _tagged(self, name: str, spans: Spans) -> dict[int, Span]:
        """What a tag of all that is there holds."""
        held = {}
        for bucket, (start, end) in spans.items():
            shelf = self.shelves[bucket]
            if end != shelf.end or not self._may_begin(bucket, start, shelf.base, end):
                raise Broken(
                    f"tag {name} holds {start} to {end} of bucket {bucket}, which has "
                    f"{shelf.start} to {shelf.end}"
                )
            held[bucket] = (start, shelf.ids[start - shelf.start :])
        return held

    # Consumers

    def _got(self, note: Note) -> None:
        """Records came from where the cursor was, in the order of their offsets."""
        self._retention.joined = True
        self.delivered.update(note["got"])
        before, after = _by_bucket(note["from"]), _by_bucket(note["to"])
        for bucket, end in after.items():
            names = [n for n in note["got"] if bucket_of(n, self.num_buckets) == bucket]
            first, cursor = end - len(names), before.get(bucket, 0)
            if first > cursor > 0:
                raise Broken(f"bucket {bucket}: {cursor} to {first} were passed over in silence")
            shelf = self.shelves[bucket]
            for offset, name in enumerate(names, first):
                if shelf.start <= offset < shelf.end and shelf.ids[offset - shelf.start] != name:
                    raise Broken(f"bucket {bucket}: {name} came as offset {offset}")

    def _told(self, cursor: dict[int, int], starts: dict[int, int]) -> None:
        if not any(0 < offset < starts[bucket] for bucket, offset in cursor.items()):
            raise Broken(f"out of range at {cursor}, though the buckets begin at {starts}")

    def _answered(self, note: Note) -> None:
        """All that were asked for, but for the first ones, which retention may have dropped."""
        found = sorted(note["ids"])
        wanted: list[str] = []
        for shelf in self.shelves.values():
            asked = [name for name in shelf.ids if self._asks_for(note, name)]
            if self._retention.by_itself:
                while asked and asked[0] not in found:
                    del asked[0]
            wanted += asked
        if found != sorted(wanted):
            raise Broken(f"{note['asked']} finds {difference(sorted(wanted), found)}")

    def _asks_for(self, note: Note, name: str) -> bool:
        if note["asked"] == "lookup":
            return bool(name == note["name"])
        return bool(self.records[name]["n"] % WORDS == note["residue"])

    # Settling

    def settle_left(self, found: dict[int, Span], tags: dict[str, Spans]) -> None:
        """What a process has left, however it ended; it is stored for good from here on."""
        self._retention.now = max(self._retention.now, time.time())
        self.settle(found, tags, lossy=not self._logged)
        for bucket, shelf in self.shelves.items():
            shelf.flushed = shelf.end
            if not self._logged:
                shelf.puts.clear()
                self._set_back(bucket, shelf.end)

    def _set_back(self, bucket: int, end: int) -> None:
        """A group may have committed what was lost: it goes on at the end that it finds."""
        committed = self.committed.get(bucket, 0)
        reached = max(committed, self._committing.get(bucket, 0))
        if reached > end:
            self._unread[bucket] = max(reached, self._unread.get(bucket, 0))
            self.committed[bucket] = min(committed, end)

    def settle(
        self, found: dict[int, Span], tags: dict[str, Spans], *, lossy: bool = False
    ) -> None:
        """Compare what was found with what may be; from here on it is what must be."""
        self._settle_tags(tags)
        for bucket, shelf in self.shelves.items():
            bases = list(self._bases(bucket, found[bucket], lossy=lossy))
            reason = shelf.explain(found[bucket], bases, lossy=lossy)
            if reason is not None:
                raise Broken(f"bucket {bucket}: {reason}")
            self._dropped(bucket, found[bucket][0])
            shelf.settle(found[bucket])
        if self._beside is not None:
            self._settle_beside(*self._beside, tags)
        if self._unsure is not None and self._unsure["begin"] == "restore":
            self.committed.clear()
        self._unsure = self._beside = self._retention.asked = None
        self._flushing.clear()
        self._retention.tags = {
            name: {bucket: start for bucket, (start, end) in spans.items() if start < end}
            for name, spans in tags.items()
        }

    def _bases(self, bucket: int, found: Span, *, lossy: bool) -> Iterator[Base]:
        """What may have been there, begun where retention may have left it."""
        start, end = found[0], found[0] + len(found[1])
        shelf, unsure = self.shelves[bucket], self._unsure
        candidates = [shelf.base]
        if lossy and shelf.flushed <= end < shelf.end:
            candidates.append(Base(shelf.start, shelf.ids[: end - shelf.start]))
        if unsure is not None and unsure["begin"] == "restore":
            candidates.append(Base(*self.tags.get(unsure["name"], {}).get(bucket, (0, []))))
        for base in candidates:
            yield base.from_(start) if self._may_begin(bucket, start, base, end) else base

    def _settle_tags(self, found: dict[str, Spans]) -> None:
        unsure = self._unsure or {}
        name = unsure.get("name") if unsure.get("begin") in ("tag", "delete_tag") else None
        beside = None if self._beside is None else self._beside[0]
        for tag in {*found, *self.tags} - {name, beside}:
            if tag not in found or tag not in self.tags:
                raise Broken(f"tag {tag} is {'not ' * (tag not in found)}there")
            if found[tag] != _ends(self.tags[tag]):
                raise Broken(f"tag {tag} holds {found[tag]} instead of {_ends(self.tags[tag])}")
        if name is None:
            return
        if name not in found:
            if name in self.tags and unsure["begin"] == "tag":
                raise Broken(f"tag {name} is gone, though it was only to be replaced")
            self.tags.pop(name, None)
        elif found[name] != _ends(self.tags.get(name, {})):
            if unsure["begin"] != "tag":
                raise Broken(f"tag {name} holds {found[name]}, which it was never to hold")
            self.tags[name] = self._tagged(name, found[name])

    def _settle_beside(
        self,
        name: str,
        floors: Spans,
        done: bool,
        found: dict[str, Spans],
    ) -> None:
        """It holds all that was acknowledged before it was begun, and nothing that came later."""
        if name not in found:
            if done or name in self.tags:
                raise Broken(f"tag {name} is not there")
        elif done or found[name] != _ends(self.tags.get(name, {})):
            for bucket, (start, end) in found[name].items():
                shelf = self.shelves[bucket]
                if start != shelf.start or not floors[bucket][1] <= end <= shelf.end:
                    raise Broken(
                        f"tag {name} holds {start} to {end} of bucket {bucket}, which had "
                        f"{floors[bucket]} before and {shelf.start, shelf.end} after it"
                    )
            self.tags[name] = {
                bucket: (start, self.shelves[bucket].ids[: end - start])
                for bucket, (start, end) in found[name].items()
            }

    # What is found by another process

    def check_rows(self, rows: dict[int, list[Record]]) -> None:
        """Every row is what was put under its id."""
        for found in rows.values():
            for row in found:
                if not same(self.records[row["id"]], row):
                    raise Broken(f"{self.records[row['id']]} came back as {row}")

    def check_group(self, committed: dict[int, int]) -> None:
        """No offset was skipped, and no commit was lost."""
        for bucket, offset in committed.items():
            shelf = self.shelves[bucket]
            read = shelf.ids[: max(0, offset - shelf.start)]
            sure = read[max(0, self._unread.get(bucket, 0) - shelf.start) :]
            skipped = [name for name in sure if name not in self.delivered]
            if skipped:
                raise Broken(f"bucket {bucket}: committed {offset} skips {skipped}")
            known = self.committed.get(bucket, 0)
            if offset < min(known, self._committing.get(bucket, known)):
                raise Broken(f"bucket {bucket}: {self.committed} was committed, {offset} is left")


def _raised_in(trace: str) -> str:
    """The last line of ours in a traceback."""
    lines = [line.strip() for line in trace.splitlines() if "src/persisting/" in line]
    return lines[-1] if lines else trace


def _looked(look: dict[str, Any]) -> dict[int, Span]:
    found = {}
    for bucket, seen in _by_bucket(look["buckets"]).items():
        end, before, after = seen["end"], seen["before"], seen["after"]
        start = end - len(seen["ids"])
        if not before[0] <= start <= after[0] or not before[1] == end == after[1]:
            raise Broken(
                f"bucket {bucket}: rows {start} to {end}, but first {before}, then {after}"
            )
        found[bucket] = (start, seen["ids"])
    return found


def _by_bucket(given: dict[str, Any]) -> dict[int, Any]:
    """As it was before it became JSON."""
    return {int(bucket): one for bucket, one in given.items()}


def _span(given: dict[str, Any]) -> Spans:
    return {bucket: (one[0], one[1]) for bucket, one in _by_bucket(given).items()}


def _spans(tags: dict[str, Any]) -> dict[str, Spans]:
    return {name: _span(buckets) for name, buckets in tags.items()}


def _ends(spans: dict[int, Span]) -> Spans:
    return {bucket: (start, start + len(ids)) for bucket, (start, ids) in spans.items()}
