"""Table calls cross the wire as a name and arguments, and come back as the same call."""

from __future__ import annotations

from typing import Any

import pytest

from persisting.backends.table_backend import TableBackend
from persisting.errors import OffsetOutOfRange, StorageError
from persisting.topic import table_calls as calls

EXAMPLES: list[tuple[calls.TableCall[Any], dict[str, Any]]] = [
    (calls.Versions(), {}),
    (calls.Tags(), {}),
    (calls.Resolve("t"), {"version": "t"}),
    (calls.Restores(), {}),
    (calls.ReadAt(3, 1, None), {"version": 3, "offset": 1, "limit": None}),
    (calls.ArrowAt(3, 0, 5), {"version": 3, "offset": 0, "limit": 5}),
    (
        calls.Rankings(vector=[0.5], k=3),
        {
            "vector": [0.5],
            "text": None,
            "column": None,
            "k": 3,
            "where": None,
            "columns": None,
            "metric": None,
            "exact": False,
        },
    ),
    (
        calls.Rankings(text="a b", match="all", fuzziness=1),
        {
            "vector": None,
            "text": "a b",
            "column": None,
            "k": 10,
            "where": None,
            "columns": None,
            "metric": None,
            "exact": False,
            "match": "all",
            "fuzziness": 1,
        },
    ),
    (calls.Indexes(), {}),
    (calls.Take([1, 2]), {"offsets": [1, 2], "columns": None}),
    (calls.Query("a = 1", ["a"], 2), {"where": "a = 1", "columns": ["a"], "limit": 2}),
    (calls.Count("a = 1"), {"where": "a = 1"}),
    (calls.Verify(), {}),
    (calls.PendingDelays(), {}),
    (calls.ArrivalOf(7), {"offset": 7}),
    (calls.MakeDurable(7), {"offset": 7}),
    (calls.Tag("pin", empty=True), {"name": "pin", "empty": True}),
    (calls.DeleteTag("pin"), {"name": "pin"}),
    (calls.RestoreVersion(2, token="x"), {"version": 2, "token": "x"}),
    (calls.CreateIndex("a"), {"column": "a", "kind": None, "metric": "l2"}),
    (calls.DropIndex("a"), {"column": "a", "kind": None}),
    (calls.Compact(), {}),
    (calls.Retain(rows=1), {"rows": 1, "bytes": None, "seconds": None}),
]


@pytest.mark.parametrize(("call", "args"), EXAMPLES, ids=[call.op for call, _ in EXAMPLES])
def test_call_is_rebuilt_from_its_name_and_arguments(
    call: calls.TableCall[Any], args: dict[str, Any]
) -> None:
    assert call.args == args
    assert calls.parse_call(call.op, call.args) == call
    assert callable(getattr(TableBackend, call.op))


def test_every_call_has_an_example() -> None:
    assert {call.op for call, _ in EXAMPLES} == set(calls._CALLS)


def test_unknown_call_is_refused() -> None:
    with pytest.raises(StorageError, match="no call 'drop_everything'"):
        calls.parse_call("drop_everything", {})


def test_unknown_argument_of_a_call_is_refused() -> None:
    with pytest.raises(TypeError, match="nope"):
        calls.parse_call("take", {"offsets": [1], "nope": 2})


def test_reads_have_a_result_for_a_bucket_that_does_not_exist() -> None:
    for call, _ in EXAMPLES:
        if isinstance(call, calls.TableRead) and not isinstance(call, calls.Take):
            call.without_bucket()
    assert calls.Take([]).without_bucket() == []
    with pytest.raises(OffsetOutOfRange, match="no offset 7"):
        calls.Take([7]).without_bucket()
