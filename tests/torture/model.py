"""What a topic must hold, from the notes of the processes that worked on it.

A look settles what could not be known before: in which order puts of several producers came, and
what became of a step that failed or was cut short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from crash.checking import Broken, same

from persisting.topic.routing import bucket_of
from torture.records import WORDS, Record

Note = dict[str, Any]
Span = tuple[int, list[str]]
"""The offset of the first row, and the ids of all."""


@dataclass
class Put:
    """The part of a put that goes to one bucket."""

    key: tuple[int, int]
    producer: int
    ids: list[str]
    acknowledged: bool = False


@dataclass
class Shelf:
    """A bucket: what was seen in it last, and what was put since."""

    start: int = 0
    ids: list[str] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def explain(self, found: Span, bases: list[Span]) -> str | None:
        """Why ``found`` cannot follow from any of the ``bases``, None if it does."""
        reasons = [self._after(found, base) for base in bases]
        return None if None in reasons else "; or ".join(str(reason) for reason in reasons)

    def settle(self, found: Span) -> None:
        """A put that was refused last of all may still come back after a crash; no other."""
        there = set(found[1])
        stored = [at for at, put in enumerate(self.puts) if put.ids[0] in there]
        self.puts = self.puts[stored[-1] + 1 if stored else 0 :]
        self.start, self.ids = found[0], list(found[1])

    def _after(self, found: Span, base: Span) -> str | None:
        start, ids = found
        if start != base[0]:
            return f"it begins at {start} instead of {base[0]}"
        if ids[: len(base[1])] != base[1]:
            return _difference(base[1], ids)
        return self._tail(ids[len(base[1]) :])

    def _tail(self, tail: list[str]) -> str | None:
        """Whole puts, each once, in order for each producer, and all that were acknowledged."""
        left = {put.ids[0]: put for put in self.puts}
        latest: dict[int, int] = {}
        at = 0
        while at < len(tail):
            put = left.pop(tail[at], None)
            if put is None:
                return f"doubled or never put: {tail[at]} behind {tail[:at][-5:]}"
            if tail[at : at + len(put.ids)] != put.ids:
                return f"a put was torn: {tail[at : at + len(put.ids)]} of {put.ids}"
            number = self.puts.index(put)
            if latest.get(put.producer, -1) > number:
                return f"another order: {put.ids} of producer {put.producer} came late"
            latest[put.producer] = number
            at += len(put.ids)
        lost = [put.ids for put in left.values() if put.acknowledged]
        return f"lost: {lost}" if lost else None


def _difference(wanted: list[str], found: list[str]) -> str:
    missing = [name for name in wanted if name not in set(found)]
    doubled = sorted({name for name in found if found.count(name) > 1})
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), None)
    return f"missing {missing[:9]}, doubled {doubled[:9]}, first difference at place {at}"


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
        self.leaks: dict[str, str] = {}
        """Errors that are none of ours, by the place where they were raised."""
        self.backups: dict[str, dict[int, tuple[int, int]]] = {}
        """By name, how many ids of each bucket it must hold, and from which offset."""
        self._unsure: Note | None = None
        self._beside: tuple[str, dict[int, tuple[int, int]], bool] | None = None
        """A tag that was made beside puts: what it must hold at least, and whether it is done."""
        self._round = 0
        self._puts: dict[tuple[int, int], list[Put]] = {}
        self._making: dict[str, dict[int, tuple[int, int]]] = {}

    def begin_round(self, number: int) -> None:
        self._round = number

    def follow(self, note: Note) -> None:
        """Take a note in; raises where it says what must not be."""
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
        elif "failed" in note and note["failed"] == "backup":
            self._making.pop(note["name"], None)
        elif "look" in note:
            self.settle(_looked(note["look"]), _spans(note["look"]["tags"]))
        elif "asked" in note:
            self._answered(note)
        elif "got" in note:
            self.delivered.update(note["got"])
        elif "commit" in note:
            self._committing = {int(b): offset for b, offset in note["commit"].items()}
        elif "committed" in note:
            self.committed |= {int(b): offset for b, offset in note["committed"].items()}
            self._committing = {}
        elif "verified" in note:
            if not note["verified"]["ok"]:
                raise Broken(f"verify: {note['verified']}")

    def _about_to_put(self, note: Note) -> None:
        key = (self._round, note["put"])
        parts: dict[int, list[str]] = {}
        for record in note["records"]:
            self.records[record["id"]] = record
            parts.setdefault(bucket_of(record["id"], self.num_buckets), []).append(record["id"])
        self._puts[key] = [Put(key, note["producer"], ids) for ids in parts.values()]
        for bucket, put in zip(parts, self._puts[key], strict=True):
            self.shelves[bucket].puts.append(put)

    def _begun(self, note: Note) -> None:
        if note["begin"] in ("tag", "delete_tag", "restore", "retain"):
            self._unsure = note
        elif note["begin"] == "backup":
            self._making[note["name"]] = self._floors()
        elif note["begin"] == "tag beside":
            self._beside = (note["name"], self._floors(), False)

    def _floors(self) -> dict[int, tuple[int, int]]:
        return {
            bucket: (
                shelf.start,
                shelf.end + sum(len(put.ids) for put in shelf.puts if put.acknowledged),
            )
            for bucket, shelf in self.shelves.items()
        }

    def _done(self, note: Note) -> None:
        what = note["done"]
        if what == "put":
            for put in self._puts[self._round, note["put"]]:
                put.acknowledged = True
        elif what == "backup":
            self.backups[note["name"]] = self._making.pop(note["name"])
        elif what == "tag beside":
            assert self._beside is not None
            self._beside = (*self._beside[:2], True)
        elif what == "tag":
            self.tags[note["name"]] = self._now()
        elif what == "delete_tag":
            del self.tags[note["name"]]
        elif what == "retain":
            starts = {int(b): at for b, at in note["result"]["start_offsets"].items()}
            for bucket, shelf in self.shelves.items():
                most = max(shelf.start, shelf.end - note["rows"])
                if not shelf.start <= starts[bucket] <= most:
                    raise Broken(
                        f"retain({note['rows']}) left {starts} of {shelf.start, shelf.end}"
                    )
                # Whoever had not come so far was told, and a restore may bring them back.
                self.delivered.update(shelf.ids[: starts[bucket] - shelf.start])
                shelf.ids = shelf.ids[starts[bucket] - shelf.start :]
                shelf.start = starts[bucket]
        elif what == "restore":
            for bucket, span in self.tags[note["name"]].items():
                self.shelves[bucket].start, self.shelves[bucket].ids = span[0], list(span[1])
            self.committed.clear()
        if what in ("tag", "delete_tag", "retain", "restore"):
            self._unsure = None

    def _now(self) -> dict[int, Span]:
        return {b: (shelf.start, list(shelf.ids)) for b, shelf in self.shelves.items()}

    def _answered(self, note: Note) -> None:
        there = [name for shelf in self.shelves.values() for name in shelf.ids]
        if note["asked"] == "lookup":
            wanted = [name for name in there if name == note["name"]]
        else:
            wanted = [n for n in there if self.records[n]["n"] % WORDS == note["residue"]]
        if sorted(note["ids"]) != sorted(wanted):
            raise Broken(
                f"{note['asked']} finds {_difference(sorted(wanted), sorted(note['ids']))}"
            )

    # Settling

    def settle(self, found: dict[int, Span], tags: dict[str, dict[int, tuple[int, int]]]) -> None:
        """Compare what was found with what may be; from here on it is what must be."""
        self._settle_tags(tags)
        for bucket, shelf in self.shelves.items():
            reason = shelf.explain(found[bucket], list(self._bases(bucket, found[bucket])))
            if reason is not None:
                raise Broken(f"bucket {bucket}: {reason}")
            shelf.settle(found[bucket])
        if self._beside is not None:
            self._settle_beside(*self._beside, tags)
        if self._unsure is not None and self._unsure["begin"] == "restore":
            self.committed.clear()
        self._unsure = self._beside = None

    def _bases(self, bucket: int, found: Span) -> Iterator[Span]:
        shelf, unsure = self.shelves[bucket], self._unsure
        yield shelf.start, shelf.ids
        if unsure is not None and unsure["begin"] == "restore":
            yield self.tags.get(unsure["name"], {}).get(bucket, (0, []))
        if unsure is not None and unsure["begin"] == "retain":
            most = max(shelf.start, shelf.end - unsure["rows"])
            if shelf.start <= found[0] <= most:
                yield found[0], shelf.ids[found[0] - shelf.start :]

    def _settle_tags(self, found: dict[str, dict[int, tuple[int, int]]]) -> None:
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
            if unsure["begin"] != "tag" or found[name] != _ends(self._now()):
                raise Broken(f"tag {name} holds {found[name]}, which it was never to hold")
            self.tags[name] = self._now()

    def _settle_beside(
        self,
        name: str,
        floors: dict[int, tuple[int, int]],
        done: bool,
        found: dict[str, dict[int, tuple[int, int]]],
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
            skipped = [
                n for n in shelf.ids[: max(0, offset - shelf.start)] if n not in self.delivered
            ]
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
    for bucket, ids in look["ids"].items():
        start, end = look["ends"][bucket]
        if end - start != len(ids):
            raise Broken(f"bucket {bucket}: offsets {start} to {end}, but {len(ids)} rows")
        found[int(bucket)] = (start, ids)
    return found


def _spans(tags: dict[str, Any]) -> dict[str, dict[int, tuple[int, int]]]:
    return {
        name: {int(bucket): (span[0], span[1]) for bucket, span in buckets.items()}
        for name, buckets in tags.items()
    }


def _ends(spans: dict[int, Span]) -> dict[int, tuple[int, int]]:
    return {bucket: (start, start + len(ids)) for bucket, (start, ids) in spans.items()}
