"""Model of a topic, built from the notes of the processes that worked on it.

An observation resolves what the notes leave open: the order of puts of several producers, and the
outcome of a step that failed or was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from support.crash.checks import PromiseBroken, same_value

from persisting.topic.routing import bucket_of
from torture.bucket_model import Baseline, BucketModel, Put, Span, difference
from torture.records import WORDS, Record
from torture.retention_model import RetentionModel
from torture.scenario import Round

Note = dict[str, Any]
Spans = dict[int, tuple[int, int]]
"""By bucket, the offset of the first row and the offset after the last row."""

FLUSHING = {
    "flush",
    "compact",
    "retain",
    "tag",
    "tag concurrent",
    "restore",
    "create_index",
    "close",
}
"""Steps that flush: what was acknowledged before them survives a crash once they are done."""


class TopicModel:
    """Follows the notes of one topic over all its rounds."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self.records: dict[str, Record] = {}
        self.buckets = {bucket: BucketModel() for bucket in range(num_buckets)}
        self.tags: dict[str, dict[int, Span]] = {}
        self.delivered: set[str] = set()
        self.committed: dict[int, int] = {}
        self._committing: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        """By bucket, the offset below which a group may skip rows: committed rows were lost and
        others took their offsets."""
        self.leaks: dict[str, str] = {}
        """Errors that are not a StorageError, by the line that raised them."""
        self.backups: dict[str, Spans] = {}
        """By name, the offsets of each bucket that a backup must hold."""
        self._uncertain: Note | None = None
        self._concurrent_tag: tuple[str, Spans, bool] | None = None
        """A tag made concurrently with puts: its name, what it must hold at least, whether it is
        done."""
        self._round = 0
        self._logged = True
        self._notes = 0
        self._retention = RetentionModel()
        self._puts: dict[tuple[int, int], list[Put]] = {}
        self._lists: dict[tuple[int, int], dict[int, list[str]]] = {}
        """Lists that went to several buckets of a log and were not observed since, by bucket."""
        self._backups_in_progress: dict[str, Spans] = {}
        self._flushing: dict[str, list[tuple[BucketModel, int, list[Put]]]] = {}
        """By step, what it flushes: in each bucket everything before an offset, and these puts."""

    def begin_round(self, round_: Round) -> None:
        self._round, self._logged = round_.number, round_.logged
        self._retention.begin_round(round_.options)

    def follow(self, note: Note) -> None:
        """Apply a note; raise if it contradicts the model."""
        self._notes += 1
        self._retention.now = max(self._retention.now, note.get("at", 0.0))
        if "crashed" in note:
            raise PromiseBroken(f"the process raised {note['crashed']}\n{note['trace']}")
        if "leaked" in note:
            self.leaks.setdefault(_raised_in(note["trace"]), note["trace"])
        elif "records" in note:
            self._on_put(note)
        elif "begin" in note:
            self._on_begin(note)
        elif "done" in note:
            self._on_done(note)
        elif "failed" in note:
            self._on_failed(note)
        elif "observation" in note:
            self.reconcile(_observed(note["observation"]), _spans(note["observation"]["tags"]))
            self._retention.now = note.get("at", 0.0)
        elif "asked" in note:
            self._on_answer(note)
        elif "got" in note:
            self._on_got(note)
        elif "out_of_range" in note:
            self._out_of_range(_by_bucket(note["out_of_range"]), _by_bucket(note["starts"]))
        elif "commit" in note:
            self._committing = _by_bucket(note["commit"])
            self._retention.may_commit(self._committing)
        elif "committed" in note:
            self.committed |= _by_bucket(note["committed"])
            self._committing = {}
        elif "verified" in note:
            if not note["verified"]["ok"]:
                raise PromiseBroken(f"verify: {note['verified']}")

    def _on_put(self, note: Note) -> None:
        key = (self._round, note["put"])
        parts: dict[int, list[str]] = {}
        for record in note["records"]:
            self.records[record["id"]] = record
            self._retention.put_at[record["id"]] = note.get("at", 0.0)
            parts.setdefault(bucket_of(record["id"], self.num_buckets), []).append(record["id"])
        self._puts[key] = [
            Put(key, note["producer"], ids, begun=self._notes) for ids in parts.values()
        ]
        if self._logged and len(parts) > 1:
            self._lists[key] = parts
        for bucket, put in zip(parts, self._puts[key], strict=True):
            self.buckets[bucket].puts.append(put)

    def _on_begin(self, note: Note) -> None:
        what = note["begin"]
        if what in FLUSHING:
            self._flushing[what] = [
                (bucket_model, bucket_model.end, bucket_model.acknowledged)
                for bucket_model in self.buckets.values()
            ]
        if what in ("tag", "delete_tag", "restore", "retain"):
            self._uncertain = note
        elif what == "backup":
            self._backups_in_progress[note["name"]] = self._floors(logged=self._logged)
        elif what == "tag concurrent":
            self._concurrent_tag = (note["name"], self._floors(), False)
        if what in ("tag", "delete_tag", "tag concurrent"):
            self._retention.tags.pop(note["name"], None)
        elif what == "retain":
            self._retention.asked = note["rows"]

    def _on_failed(self, note: Note) -> None:
        self._flushing.pop(note["failed"], None)
        if note["failed"] == "backup":
            self._backups_in_progress.pop(note["name"], None)

    def _floors(self, *, logged: bool = True) -> Spans:
        return {
            bucket: (bucket_model.start, bucket_model.safe_end(logged=logged))
            for bucket, bucket_model in self.buckets.items()
        }

    def _on_done(self, note: Note) -> None:
        what = note["done"]
        for bucket_model, end, puts in self._flushing.pop(what, ()):
            bucket_model.flushed = max(bucket_model.flushed, end)
            for put in puts:
                put.flushed = True
        if what == "put":
            for put in self._puts[self._round, note["put"]]:
                put.acknowledged = self._notes
        elif what == "backup":
            self.backups[note["name"]] = self._backups_in_progress.pop(note["name"])
        elif what == "tag concurrent":
            assert self._concurrent_tag is not None
            self._concurrent_tag = (*self._concurrent_tag[:2], True)
        elif what == "tag":
            self.tags[note["name"]] = self._tag_content(note["name"], _span(note["result"]))
        elif what == "delete_tag":
            del self.tags[note["name"]]
        elif what == "retain":
            for bucket, start in _by_bucket(note["result"]["start_offsets"]).items():
                self._on_retained(bucket, start, note["rows"])
            self._retention.asked = None
        elif what == "restore":
            for bucket, span in self.tags[note["name"]].items():
                bucket_model = self.buckets[bucket]
                bucket_model.start, bucket_model.ids = span[0], list(span[1])
                bucket_model.flushed = bucket_model.end
            self.committed.clear()
            self._lists.clear()
        if what in ("tag", "delete_tag", "retain", "restore"):
            self._uncertain = None

    def _on_retained(self, bucket: int, start: int, rows: int) -> None:
        bucket_model = self.buckets[bucket]
        if not self._may_start_at(bucket, start, bucket_model.base, bucket_model.end):
            raise PromiseBroken(
                f"retain({rows}) left {start} of {bucket_model.start, bucket_model.end}"
            )
        self._dropped(bucket, start)
        bucket_model.start, bucket_model.ids = start, bucket_model.ids[start - bucket_model.start :]

    def _dropped(self, bucket: int, start: int) -> None:
        """Count dropped rows as delivered: readers get OffsetOutOfRange, and a restore may bring
        them back."""
        bucket_model = self.buckets[bucket]
        self.delivered.update(bucket_model.ids[: max(0, start - bucket_model.start)])

    def _may_start_at(self, bucket: int, start: int, base: Baseline, end: int) -> bool:
        """Return whether retention may have moved the start of ``base`` to ``start``."""
        if start <= base.start:
            return start == base.start
        left = base.from_(start)
        gone = base.ids[: len(base.ids) - len(left.ids)]
        return self._retention.allows(bucket, start, end, gone + self._oldest(bucket, left.unseen))

    def _oldest(self, bucket: int, count: int) -> list[str]:
        """Return the ``count`` oldest ids that were put and not observed since."""
        unseen = [name for put in self.buckets[bucket].puts for name in put.ids]
        return sorted(unseen, key=self._retention.put_at.__getitem__)[:count]

    def _tag_content(self, name: str, spans: Spans) -> dict[int, Span]:
        """Return the rows of a tag of the current state."""
        held = {}
        for bucket, (start, end) in spans.items():
            bucket_model = self.buckets[bucket]
            if end != bucket_model.end or not self._may_start_at(
                bucket, start, bucket_model.base, end
            ):
                raise PromiseBroken(
                    f"tag {name} holds {start} to {end} of bucket {bucket}, which has "
                    f"{bucket_model.start} to {bucket_model.end}"
                )
            held[bucket] = (start, bucket_model.ids[start - bucket_model.start :])
        return held

    # Consumers

    def _on_got(self, note: Note) -> None:
        """Check that records came from the cursor on, in the order of their offsets."""
        self._retention.joining = True
        self.delivered.update(note["got"])
        before, after = _by_bucket(note["from"]), _by_bucket(note["to"])
        for bucket, end in after.items():
            names = [n for n in note["got"] if bucket_of(n, self.num_buckets) == bucket]
            first, cursor = end - len(names), before.get(bucket, 0)
            if first > cursor > 0:
                raise PromiseBroken(
                    f"bucket {bucket}: {cursor} to {first} were skipped without an error"
                )
            bucket_model = self.buckets[bucket]
            for offset, name in enumerate(names, first):
                if (
                    bucket_model.start <= offset < bucket_model.end
                    and bucket_model.ids[offset - bucket_model.start] != name
                ):
                    raise PromiseBroken(f"bucket {bucket}: {name} was read at offset {offset}")

    def _out_of_range(self, cursor: dict[int, int], starts: dict[int, int]) -> None:
        if not any(0 < offset < starts[bucket] for bucket, offset in cursor.items()):
            raise PromiseBroken(f"out of range at {cursor}, though the buckets start at {starts}")

    def _on_answer(self, note: Note) -> None:
        """Check the result of a query. Retention may have dropped the first rows."""
        found = sorted(note["ids"])
        expected: list[str] = []
        for bucket_model in self.buckets.values():
            asked = [name for name in bucket_model.ids if self._asks_for(note, name)]
            if self._retention.automatic:
                while asked and asked[0] not in found:
                    del asked[0]
            expected += asked
        if found != sorted(expected):
            raise PromiseBroken(f"{note['asked']} finds {difference(sorted(expected), found)}")

    def _asks_for(self, note: Note, name: str) -> bool:
        if note["asked"] == "lookup":
            return bool(name == note["name"])
        return bool(self.records[name]["n"] % WORDS == note["residue"])

    # Observations

    def reconcile_after_exit(self, found: dict[int, Span], tags: dict[str, Spans]) -> None:
        """Accept what a process left on disk, however it ended. It is durable from here on."""
        self._retention.now = max(self._retention.now, time.time())
        self.reconcile(found, tags, lossy=not self._logged)
        for bucket, bucket_model in self.buckets.items():
            bucket_model.flushed = bucket_model.end
            if not self._logged:
                bucket_model.puts.clear()
                self._lists.clear()
                self._lower_commits(bucket, bucket_model.end)

    def _lower_commits(self, bucket: int, end: int) -> None:
        """A group may have committed rows that were lost: it continues at the new end."""
        committed = self.committed.get(bucket, 0)
        reached = max(committed, self._committing.get(bucket, 0))
        if reached > end:
            self._unread[bucket] = max(reached, self._unread.get(bucket, 0))
            self.committed[bucket] = min(committed, end)

    def reconcile(
        self, found: dict[int, Span], tags: dict[str, Spans], *, lossy: bool = False
    ) -> None:
        """Compare what was found with the states that are possible, then accept it as the new
        state."""
        self._reconcile_tags(tags)
        self._check_lists(found)
        for bucket, bucket_model in self.buckets.items():
            bases = list(self._bases(bucket, found[bucket], lossy=lossy))
            reason = bucket_model.find_problem(found[bucket], bases, lossy=lossy)
            if reason is not None:
                raise PromiseBroken(f"bucket {bucket}: {reason}")
            self._dropped(bucket, found[bucket][0])
            bucket_model.reconcile(found[bucket])
        if self._concurrent_tag is not None:
            self._reconcile_concurrent_tag(*self._concurrent_tag, tags)
        if self._uncertain is not None and self._uncertain["begin"] == "restore":
            self.committed.clear()
        self._uncertain = self._concurrent_tag = self._retention.asked = None
        self._flushing.clear()
        self._retention.joined |= self._retention.joining
        self._retention.tags = {
            name: {bucket: start for bucket, (start, end) in spans.items() if start < end}
            for name, spans in tags.items()
        }

    def _check_lists(self, found: dict[int, Span]) -> None:
        """Raise if a list put is in some of its buckets only, although they share a log."""
        may_be_cut = self._retention.automatic or (
            self._uncertain is not None and self._uncertain["begin"] in ("restore", "retain")
        )
        if may_be_cut:
            self._lists.clear()
            return
        stored = {name for _, ids in found.values() for name in ids}
        for key, parts in list(self._lists.items()):
            held = {bucket for bucket, ids in parts.items() if stored.issuperset(ids)}
            if held and held != set(parts):
                raise PromiseBroken(
                    f"{parts} is in the buckets {sorted(held)} only, though all share a log"
                )
            if held:  # others may still appear after a crash
                del self._lists[key]

    def _bases(self, bucket: int, found: Span, *, lossy: bool) -> Iterator[Baseline]:
        """Yield the possible earlier rows, starting where retention may have left them."""
        start, end = found[0], found[0] + len(found[1])
        bucket_model, uncertain = self.buckets[bucket], self._uncertain
        candidates = [bucket_model.base]
        if lossy and bucket_model.flushed <= end < bucket_model.end:
            candidates.append(
                Baseline(bucket_model.start, bucket_model.ids[: end - bucket_model.start])
            )
        if uncertain is not None and uncertain["begin"] == "restore":
            candidates.append(Baseline(*self.tags.get(uncertain["name"], {}).get(bucket, (0, []))))
        for base in candidates:
            yield base.from_(start) if self._may_start_at(bucket, start, base, end) else base

    def _reconcile_tags(self, found: dict[str, Spans]) -> None:
        uncertain = self._uncertain or {}
        name = uncertain.get("name") if uncertain.get("begin") in ("tag", "delete_tag") else None
        concurrent = None if self._concurrent_tag is None else self._concurrent_tag[0]
        for tag in {*found, *self.tags} - {name, concurrent}:
            if tag not in found or tag not in self.tags:
                state = "missing" if tag not in found else "unexpected"
                raise PromiseBroken(f"tag {tag} is {state}")
            if found[tag] != _as_spans(self.tags[tag]):
                raise PromiseBroken(
                    f"tag {tag} holds {found[tag]} instead of {_as_spans(self.tags[tag])}"
                )
        if name is None:
            return
        if name not in found:
            if name in self.tags and uncertain["begin"] == "tag":
                raise PromiseBroken(f"tag {name} is missing, though it was only being replaced")
            self.tags.pop(name, None)
        elif found[name] != _as_spans(self.tags.get(name, {})):
            if uncertain["begin"] != "tag":
                raise PromiseBroken(
                    f"tag {name} holds {found[name]}, which it was never meant to hold"
                )
            self.tags[name] = self._tag_content(name, found[name])

    def _reconcile_concurrent_tag(
        self,
        name: str,
        floors: Spans,
        done: bool,
        found: dict[str, Spans],
    ) -> None:
        """Check that the tag holds everything acknowledged before it started, and nothing put after
        it."""
        if name not in found:
            if done or name in self.tags:
                raise PromiseBroken(f"tag {name} is missing")
        elif done or found[name] != _as_spans(self.tags.get(name, {})):
            for bucket, (start, end) in found[name].items():
                bucket_model = self.buckets[bucket]
                if start != bucket_model.start or not floors[bucket][1] <= end <= bucket_model.end:
                    raise PromiseBroken(
                        f"tag {name} holds {start} to {end} of bucket {bucket}, which had "
                        f"{floors[bucket]} before and "
                        f"{bucket_model.start, bucket_model.end} after it"
                    )
            self.tags[name] = {
                bucket: (start, self.buckets[bucket].ids[: end - start])
                for bucket, (start, end) in found[name].items()
            }

    # Checks by another process

    def check_rows(self, rows: dict[int, list[Record]]) -> None:
        """Raise unless every row equals what was put with its id."""
        for found in rows.values():
            for row in found:
                if not same_value(self.records[row["id"]], row):
                    raise PromiseBroken(f"{self.records[row['id']]} came back as {row}")

    def check_group(self, committed: dict[int, int]) -> None:
        """Raise if a commit skipped an offset or was lost."""
        for bucket, offset in committed.items():
            bucket_model = self.buckets[bucket]
            read = bucket_model.ids[: max(0, offset - bucket_model.start)]
            sure = read[max(0, self._unread.get(bucket, 0) - bucket_model.start) :]
            skipped = [name for name in sure if name not in self.delivered]
            if skipped:
                raise PromiseBroken(f"bucket {bucket}: committed {offset} skips {skipped}")
            known = self.committed.get(bucket, 0)
            if offset < min(known, self._committing.get(bucket, known)):
                raise PromiseBroken(
                    f"bucket {bucket}: {self.committed} was committed, but {offset} is stored"
                )


def _raised_in(trace: str) -> str:
    """Return the last line of a traceback that is in src/persisting."""
    lines = [line.strip() for line in trace.splitlines() if "src/persisting/" in line]
    return lines[-1] if lines else trace


def _observed(look: dict[str, Any]) -> dict[int, Span]:
    found = {}
    for bucket, seen in _by_bucket(look["buckets"]).items():
        end, before, after = seen["end"], seen["before"], seen["after"]
        start = end - len(seen["ids"])
        if not before[0] <= start <= after[0] or not before[1] == end == after[1]:
            raise PromiseBroken(
                f"bucket {bucket}: rows {start} to {end}, but first {before}, then {after}"
            )
        found[bucket] = (start, seen["ids"])
    return found


def _by_bucket(given: dict[str, Any]) -> dict[int, Any]:
    """Convert the keys back to integers, which JSON made strings."""
    return {int(bucket): value for bucket, value in given.items()}


def _span(given: dict[str, Any]) -> Spans:
    return {bucket: (span[0], span[1]) for bucket, span in _by_bucket(given).items()}


def _spans(tags: dict[str, Any]) -> dict[str, Spans]:
    return {name: _span(buckets) for name, buckets in tags.items()}


def _as_spans(spans: dict[int, Span]) -> Spans:
    return {bucket: (start, start + len(ids)) for bucket, (start, ids) in spans.items()}
