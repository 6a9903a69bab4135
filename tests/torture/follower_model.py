"""Model of a reader without the lock: what it was shown, compared with what its topic holds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from support.crash.checks import PromiseBroken, same_value

from torture.bucket_model import Span
from torture.records import Record
from torture.topic_model import Note


class Content(NamedTuple):
    """The rows of a bucket at the end of a round."""

    epoch: int
    span: Span

    @property
    def end(self) -> int:
        return self.span[0] + len(self.span[1])


@dataclass
class _Followed:
    """What was shown of one bucket in one round, by epoch and offset."""

    epoch: int | None = None
    offset: int = 0
    """Where the stream continues; 0 stands for the earliest row."""
    shown: defaultdict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    stored: defaultdict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """What the owner itself has read."""
    jumps: list[tuple[int, int]] = field(default_factory=list)
    """Epochs and offsets at which the stream continued after rows that it was not shown."""


class FollowerModel:
    """Follows the notes of one reader after the other."""

    def __init__(self, num_buckets: int) -> None:
        self._buckets = {bucket: _Followed() for bucket in range(num_buckets)}

    def restart(self) -> None:
        """Expect a new reader, which begins with the earliest row of each bucket."""
        for followed in self._buckets.values():
            followed.epoch, followed.offset = None, 0

    def observe(self, bucket: int, epoch: int, span: Span) -> None:
        """Accept what the owner of a bucket has read."""
        self._buckets[bucket].stored[epoch].update(enumerate(span[1], span[0]))

    def follow(self, note: Note, records: dict[str, Record]) -> None:
        """Apply a note; raise unless the stream is in order and the records are those put."""
        if "crashed" in note:
            raise PromiseBroken(f"a reader without the lock raised {note['trace']}")
        if "seen" in note:
            self._on_seen(note, records)
        elif "restored" in note:
            self._on_restored(self._buckets[note["restored"]], note["epoch"], note["offset"])
        elif "skipped" in note:
            self._buckets[note["skipped"]].offset = 0

    def _on_seen(self, note: Note, records: dict[str, Record]) -> None:
        bucket, first, epoch = note["bucket"], note["first"], note["epoch"]
        followed = self._buckets[bucket]
        if followed.epoch not in (None, epoch):
            raise PromiseBroken(
                f"bucket {bucket}: a reader was shown offset {first} of epoch {epoch} without "
                f"notice that epoch {followed.epoch} is over"
            )
        if first != followed.offset:
            if followed.offset:
                raise PromiseBroken(
                    f"bucket {bucket}: a reader was shown offset {first} instead of "
                    f"{followed.offset}"
                )
            followed.jumps.append((epoch, first))
        shown = followed.shown[epoch]
        for offset, row in enumerate(note["seen"], first):
            if row["id"] not in records:
                raise PromiseBroken(f"bucket {bucket}: a reader was shown {row}, never put")
            if not same_value(records[row["id"]], row):
                raise PromiseBroken(
                    f"bucket {bucket}: a reader was shown {row} instead of {records[row['id']]}"
                )
            if shown.setdefault(offset, row["id"]) != row["id"]:
                raise PromiseBroken(
                    f"bucket {bucket}, epoch {epoch}: a reader was shown {shown[offset]} at offset "
                    f"{offset}, later {row['id']}"
                )
        followed.epoch, followed.offset = epoch, first + len(note["seen"])

    def _on_restored(self, followed: _Followed, epoch: int, offset: int) -> None:
        """Keep the rows before the offset at which the reader continues: they must not differ."""
        if followed.epoch is not None and followed.epoch < epoch:
            kept = {o: name for o, name in followed.shown[followed.epoch].items() if o < offset}
            followed.shown[epoch] = kept
        followed.epoch, followed.offset = epoch, offset

    def behind(self, contents: dict[int, Content], *, lossy: bool) -> str | None:
        """Return what the reader was not shown yet, or should not have been shown.

        ``lossy``: it may have been shown rows beyond the end, which an owner had in memory only.
        """
        for bucket, content in contents.items():
            followed = self._buckets[bucket]
            reached = followed.epoch, followed.offset
            if lossy and followed.epoch == content.epoch and followed.offset > content.end:
                continue
            if content.span[1] and reached != (content.epoch, content.end):
                return (
                    f"bucket {bucket} ends at offset {content.end} of epoch {content.epoch}, the "
                    f"reader is at offset {followed.offset} of epoch {followed.epoch}"
                )
        return None

    def check(self, contents: dict[int, Content], *, lossy: bool) -> None:
        """Raise unless everything that was shown is what the buckets hold or held.

        ``lossy``: the last rows may be lost, because there was no log.
        """
        for bucket, content in contents.items():
            followed = self._buckets[bucket]
            self.observe(bucket, content.epoch, content.span)
            for epoch, shown in followed.shown.items():
                end = content.end if epoch == content.epoch and not lossy else None
                reason = _find_problem(shown, followed.stored[epoch], end)
                if reason is not None:
                    raise PromiseBroken(f"bucket {bucket}, epoch {epoch}: a reader was {reason}")
            for epoch, first in followed.jumps:
                if epoch == content.epoch and first > content.span[0]:
                    raise PromiseBroken(
                        f"bucket {bucket}: a reader began with offset {first}, though the bucket "
                        f"starts at {content.span[0]}"
                    )
            self._begin_round(followed, content)

    def _begin_round(self, followed: _Followed, content: Content) -> None:
        """Forget what no later round can contradict, or what power loss has taken."""
        start, ids = content.span
        stored = dict(enumerate(ids, start))
        shown = followed.shown[content.epoch]
        followed.shown.clear()
        followed.stored.clear()
        followed.jumps.clear()
        followed.stored[content.epoch] = stored
        followed.shown[content.epoch] = {o: n for o, n in shown.items() if o in stored}


def _find_problem(shown: dict[int, str], stored: dict[int, str], end: int | None) -> str | None:
    """Return what is wrong with the rows that were shown in one epoch, and may go up to ``end``."""
    names = list(shown.values())
    if len(set(names)) != len(names):
        return f"shown {sorted({n for n in names if names.count(n) > 1})[:9]} twice"
    for offset, name in sorted(shown.items()):
        if end is not None and offset >= end:
            return f"shown {name} at offset {offset}, but the bucket ends at {end}"
        if stored.get(offset, name) != name:
            return f"shown {name} at offset {offset}, where {stored[offset]} is stored"
    return None
