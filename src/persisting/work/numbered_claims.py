"""What the claims of members got, by number: a claim whose answer was lost can be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class NumberedClaims:
    """The tokens of claims that a member may not have the answers to.

    With every claim a member says which answers it has, and these claims are forgotten. Those of a
    member that died are forgotten once it has no lease of them.
    """

    def __init__(self, claims: Iterable[tuple[str, int, int, int]] = ()) -> None:
        self._members = _by_member(claims)

    def add(self, member: str, number: int, answered: int, first: int, count: int) -> None:
        """Note that a claim got ``count`` tokens from ``first`` on, and that the member has the
        answers to its claims below ``answered``."""
        claims = self._members.setdefault(member, {})
        for old in [old for old in claims if old < answered]:
            del claims[old]
        claims[number] = first, count

    def find(self, member: str, number: int) -> tuple[int, int] | None:
        """Return the first token of a claim and how many it got, None for a claim without any."""
        return self._members.get(member, {}).get(number)

    def keep_held(self, tokens: Sequence[Any]) -> None:
        """Forget claims without a lease; ``tokens`` are arrays with the tokens of all leases."""
        held = np.sort(np.concatenate(tokens)) if tokens else np.empty(0, dtype=np.int64)
        self._members = _by_member(
            claim
            for claim in self.dump()
            if np.searchsorted(held, claim[2]) < np.searchsorted(held, claim[2] + claim[3])
        )

    def dump(self) -> list[tuple[str, int, int, int]]:
        return [
            (member, number, *tokens)
            for member, claims in self._members.items()
            for number, tokens in claims.items()
        ]


def _by_member(
    claims: Iterable[tuple[str, int, int, int]],
) -> dict[str, dict[int, tuple[int, int]]]:
    members: dict[str, dict[int, tuple[int, int]]] = {}
    for member, number, first, count in claims:
        members.setdefault(member, {})[number] = first, count
    return members
