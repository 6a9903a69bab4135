"""What a keeper, its members and its journal exchange: leases, dead letters, settings."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, TypeAlias

import msgspec

from persisting.errors import InvalidArgument, LeaseLost

Position: TypeAlias = "tuple[int, int]"
"""A bucket and an offset."""


class RecordLease(NamedTuple):
    """A delivery: one record, leased to one member."""

    bucket: int
    offset: int
    token: int
    attempt: int
    first: int
    last: int
    until: int
    letter: int
    """Where the dead letter is that the record was re-driven from, -1 for none."""
    epoch: int
    """The epoch of the bucket, as far as the group knows."""
    end: int
    """The records of the bucket below this offset are durable: they may be read ahead."""


class Letter(NamedTuple):
    """A dead letter that is to be re-driven."""

    number: int
    place: int
    """Where it is in the topic of the dead letters."""
    bucket: int
    offset: int
    generation: int
    key: int = 0
    """The hash of the record's key, for groups that are ordered by one."""
    priority: int = 0


class Settings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What all members of a group have in common."""

    max_deliveries: int = 5
    ordered_by: str | None = None
    priority: str | None = None
    visible_at: str | None = None
    breaker: bool = True
    """Whether the group slows down while most deliveries fail."""
    identity: str = ""
    """Random: the dead letters of a group that was deleted and created again are not its own."""

    @property
    def reads_ahead(self) -> bool:
        """Whether fields of a record decide when it is delivered."""
        return any((self.ordered_by, self.priority, self.visible_at))


class Dying(msgspec.Struct, array_like=True):
    """A record on its way to the dead letters."""

    reason: str
    time: int
    token: int
    """The lease of the member that rejected it; 0 if it was delivered too often."""
    number: int = 0
    """The number of its dead letter once that is in the batch that is being put, else 0."""


def lost_lease(bucket: int, offset: int) -> LeaseLost:
    """Return the error for a delivery that no longer belongs to its member."""
    return LeaseLost(
        f"the lease on offset {offset} of bucket {bucket} is lost: it ended, and the record was "
        "delivered again or is finished. Do not repeat the call; ask for longer leases, or call "
        "extend() while the work lasts"
    )


_FIXED = ("ordered_by", "priority", "visible_at")


def agreed_settings(current: Settings, given: dict[str, Any], group: str) -> Settings:
    """Return the settings of a group after a member has asked for some of them."""
    if not current.identity:
        wanted = {name: value for name, value in given.items() if value is not None}
        return msgspec.convert({**wanted, "identity": uuid.uuid4().hex}, Settings)
    for name in _FIXED:
        value = given.get(name)
        if value is not None and value != getattr(current, name):
            raise InvalidArgument(
                f"work group {group!r} has {name}={getattr(current, name)!r}, not {value!r}; it is "
                "fixed when the group is created. Use another group"
            )
    changed = {n: given[n] for n in ("max_deliveries", "breaker") if given.get(n) is not None}
    return msgspec.structs.replace(current, **changed)
