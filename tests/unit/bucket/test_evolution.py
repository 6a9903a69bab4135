"""PersistingBackend takes new fields and wider types, and changes nothing that was stored."""

from __future__ import annotations

import datetime as dt
import random
import shutil
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from support.buckets import Bucket, until_freed
from support.comparing import canonical, equal_but_for_absent

from persisting.queue import InvalidArgument, SchemaError

U = UUID(int=5)

# A stored value, and a later value of the same field.
COMPATIBLE: list[tuple[Any, Any]] = [
    (1, 1.5),
    (1.5, 2),
    (None, 1),
    (None, {"a": [1]}),
    (None, [0.5, 1.5]),
    ([], [1]),
    ([], [0.5, 1.5]),
    ([], [{"a": 1}]),
    ([None], ["x"]),
    ([1], [1.5]),
    ([1, None], [None, 1.5, 2]),
    ([[]], [[1], None]),
    ([[1]], [[1.5]]),
    ([0.5, 1.5], [0.5]),
    ([0.5, 1.5], []),
    ([0.5, 1.5], [0.5, None]),
    ([1, 2], [0.5, 1.5]),
    ([0.5, 1.5], [1, 2]),
    (np.array([0.5, 1.5], dtype=np.float32), [0.1, 0.2]),
    (np.array([0.5, 1.5], dtype=np.float16), np.array([0.1, 0.2], dtype=np.float32)),
    ({"a": 1}, {"b": "x"}),
    ({"a": 1}, {"a": 1.5}),
    ({}, {"a": 1}),
    ({"a": None}, {"a": {"b": 1}}),
    ({"a": []}, {"a": [{"b": U}]}),
    ({"a": {"b": 1}}, {"a": {"c": [{"d": dt.date(2024, 1, 1)}]}}),
    ([{"a": 1}], [{"b": 1}, None]),
    ([{"a": 1}, {"a": None}], [{"a": 1.5, "b": []}]),
    ([{}], [{"a": 1}]),
    ([{"a": []}], [{"a": [[1, 2]]}, None]),
    ([[{"a": 1}], None], [[{"a": 1, "b": U}]]),
    ({"u": U}, {"u": U, "v": [U]}),
]

# A stored value, a later value that contradicts it, and the path named in the error.
CONTRADICTING: list[tuple[Any, Any, str]] = [
    (1, "a", "'x' is int, got str"),
    ("a", 1, "'x' is str, got int"),
    (1, True, "'x' is int, got bool"),
    (True, 1, "'x' is bool, got int"),
    (1.5, True, "'x' is float, got bool"),
    ("a", b"a", "'x' is str, got bytes"),
    (b"a", "a", "'x' is bytes, got str"),
    (dt.date(2024, 1, 1), dt.datetime(2024, 1, 1), "'x' is date, got datetime without timezone"),
    (
        dt.datetime(2024, 1, 1),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        "'x' is datetime without timezone, got datetime with timezone",
    ),
    ([1], 1, "'x' is list of int, got int"),
    ([1], ["a"], r"'x\[\]' is int, got str"),
    ([0.5], "a", "'x' is vector of 1 floats, got str"),
    ({"a": 1}, {"a": "x"}, "'x.a' is int, got str"),
    ({"a": 1}, [1], "'x' is dict with a, got list of int"),
    ([{"a": [1]}], [{"a": [{"b": 1}]}], r"'x\[\].a\[\]' is int, got dict with b"),
    (U, b"0" * 16, "'x' is UUID, got bytes"),
]


@pytest.fixture(params=[False, True], ids=["plain", "wal"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"enable_wal": request.param, "flush_interval": None}


ways = pytest.mark.parametrize(
    ("options", "flushed"),
    [
        pytest.param({"flush_interval": None}, True, id="flushed"),
        pytest.param({"flush_interval": None, "enable_wal": True}, False, id="logged"),
    ],
)


async def check_everywhere(bucket: Bucket, backend: Any, rows: list[dict[str, Any]]) -> None:
    """Assert that the rows read the same from the buffer, in windows, flushed and reopened."""

    def check(got: list[dict[str, Any]], expected: list[dict[str, Any]], when: str) -> None:
        assert len(got) == len(expected), when
        for ours, theirs in zip(canonical(expected), got, strict=True):
            assert equal_but_for_absent(ours, theirs), f"{when}: {ours!r} {theirs!r}"

    check(await backend.get(), rows, "as it is")
    for offset in range(len(rows)):
        check(await backend.get(offset, 2), rows[offset : offset + 2], "a window")
    await backend.flush()
    check(await backend.get(), rows, "flushed")
    for offset in range(len(rows)):
        check(await backend.get(offset, 2), rows[offset : offset + 2], "a flushed window")
    backend = await bucket.reopen(backend, **{"flush_interval": None})
    check(await backend.get(), rows, "reopened")


@ways
@pytest.mark.parametrize(("old", "new"), COMPATIBLE, ids=lambda v: repr(v)[:30])
async def test_a_compatible_value_widens_the_field(
    persisting: Bucket, options: dict[str, Any], old: Any, new: Any, flushed: bool
) -> None:
    backend = persisting.open(**options)
    rows = [{"i": 0, "x": old}, {"i": 1, "x": None}, {"i": 2}, {"i": 3, "x": old}]
    for row in rows[:2]:
        await backend.put(row)
    await backend.put_batch(rows[2:])
    if flushed:
        await backend.flush()
    later = [{"i": 4, "x": new}, {"i": 5, "x": old}, {"i": 6}, {"x": new}]
    await backend.put(later[0])
    await backend.put_batch(later[1:])
    await check_everywhere(persisting, backend, rows + later)


@ways
@pytest.mark.parametrize(("old", "new", "words"), CONTRADICTING, ids=lambda v: repr(v)[:30])
async def test_a_conflicting_value_raises_at_put_and_loses_nothing(
    persisting: Bucket, options: dict[str, Any], old: Any, new: Any, words: str, flushed: bool
) -> None:
    backend = persisting.open(**options)
    await backend.put({"x": old})
    if flushed:
        await backend.flush()
    with pytest.raises(SchemaError, match=words):
        await backend.put({"x": new})
    with pytest.raises(SchemaError, match=words):
        await backend.put_batch([{"x": old, "new": 1}, {"x": new}])
    await backend.put({"x": old})
    await check_everywhere(persisting, backend, [{"x": old}, {"x": old}])
    backend = persisting.open(read_only=True)
    assert list((await backend.get())[0]) == ["x"]


async def test_fields_come_in_the_order_of_their_first_appearance(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(**options)
    for row in ({"m": 1}, {"a": 1, "m": 1}, {"z": None}, {"b": 1, "a": 2}, {"z": 1.5, "m": 2.5}):
        await backend.put(row)
        await backend.flush()
    order = ["m", "a", "z", "b"]
    assert {tuple(r) for r in await backend.get()} == {tuple(order)}
    assert (await backend.get_arrow()).column_names == order
    backend = await persisting.reopen(backend)
    assert {tuple(r) for r in await backend.get()} == {tuple(order)}


@pytest.mark.parametrize("where", ["table", "buffer", "both"])
@pytest.mark.parametrize("large", [2**53 + 1, -(2**53) - 1, 2**63 - 1])
async def test_int_becomes_float_only_if_no_stored_int_would_change(
    persisting: Bucket, options: dict[str, Any], where: str, large: int
) -> None:
    shapes = {"top": lambda n: n, "list": lambda n: [n], "dict": lambda n: {"a": [{"b": n}]}}
    for name, shape in shapes.items():
        backend = persisting.open(**options)
        await backend.put({name: shape(large)})
        await backend.put({name: shape(1)})
        if where != "buffer":
            await backend.flush()
        if where == "both":
            await backend.put({name: shape(large)})
        before = await backend.get()
        with pytest.raises(SchemaError, match=rf"'{name}.*2\*\*53"):
            await backend.put({name: shape(1.5)})
        with pytest.raises(SchemaError, match=rf"'{name}"):
            await backend.put_batch([{name: shape(1)}, {name: shape(1.5)}])
        assert await backend.get() == before
        await backend.flush()
        assert await backend.get() == before
        await backend.close()


async def test_int_becomes_float_at_the_edge(persisting: Bucket, options: dict[str, Any]) -> None:
    backend = persisting.open(**options)
    await backend.put_batch([{"x": 2**53}, {"x": -(2**53)}])
    await backend.flush()
    await backend.put({"x": 0.5})
    with pytest.raises(SchemaError, match="9007199254740993"):
        await backend.put({"x": 2**53 + 1})
    await check_everywhere(persisting, backend, [{"x": 2**53}, {"x": -(2**53)}, {"x": 0.5}])


async def test_a_large_int_and_a_float_in_one_batch_raise(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(**options)
    for batch in ([{"x": 2**53 + 1}, {"x": 1.5}], [{"x": 1.5}, {"x": 2**53 + 1}]):
        with pytest.raises(SchemaError, match="'x'"):
            await backend.put_batch(batch)
    await backend.flush()
    assert backend.total_count() == 0


async def test_large_ints_are_found_in_recovered_records(persisting: Bucket) -> None:
    backend = persisting.kind.cls(0, str(persisting.folder), enable_wal=True)
    await backend.put({"x": 2**53 + 1})
    del backend
    await until_freed(persisting.folder)
    backend = persisting.open(enable_wal=True)
    with pytest.raises(SchemaError, match="'x'"):
        await backend.put({"x": 1.5})
    assert await backend.get() == [{"x": 2**53 + 1}]


@pytest.mark.parametrize(
    ("old", "new", "wide"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int8(), pa.int32(), pa.int32()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.float32(), pa.float64(), pa.float64()),
    ],
)
async def test_arrow_numbers_widen(
    persisting: Bucket,
    options: dict[str, Any],
    old: pa.DataType,
    new: pa.DataType,
    wide: pa.DataType,
) -> None:
    backend = persisting.open(**options)
    await backend.put_arrow(pa.table({"x": pa.array([1, None, 2], pa.int8()).cast(old)}))
    await backend.flush()
    await backend.put_arrow(pa.table({"x": pa.array([3], pa.int8()).cast(new)}))
    assert (await backend.get_arrow()).schema.field("x").type == wide
    await backend.put({"x": 4})
    await check_everywhere(persisting, backend, [{"x": n} for n in (1, None, 2, 3, 4)])


async def test_a_dict_value_beyond_an_arrow_int32_widens_it(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(**options)
    await backend.put_arrow(pa.table({"x": pa.array([1], pa.int32())}))
    await backend.flush()
    await backend.put({"x": 2})
    assert (await backend.get_arrow()).schema.field("x").type == pa.int32()
    await backend.put({"x": 2**40})
    assert (await backend.get_arrow()).schema.field("x").type == pa.int64()
    await check_everywhere(persisting, backend, [{"x": 1}, {"x": 2}, {"x": 2**40}])


async def test_values_hidden_under_an_arrow_null_do_not_prevent_widening(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(**options)
    mask = pa.array([True, False])
    hidden = pa.StructArray.from_arrays([pa.array([2**60, 1])], ["a"], mask=mask)
    await backend.put_arrow(pa.table({"x": hidden}))
    await backend.put({"x": {"a": 1.5}})
    await check_everywhere(persisting, backend, [{"x": None}, {"x": {"a": 1}}, {"x": {"a": 1.5}}])


@pytest.mark.parametrize(
    "rows",
    [
        [{"v": [{"t": {"id": U}, "n": 0}]}, {}, {"v": [{"n": 0.5}]}],
        [{"v": [{"t": U, "n": 1}]}, {"v": None}, {"v": [None]}, {"v": [{"n": 1.5}, {"m": U}]}],
        [{"v": [[U], None]}, {"v": None}, {"v": []}, {"w": {"l": [{"u": U, "n": 1}]}}, {}],
        [{"v": {"l": [{"u": U, "n": 1}]}}, {"v": {"l": None}}, {}, {"v": {"l": [{"n": 0.5}]}}],
    ],
    ids=["deep", "in-dicts", "in-lists", "in-lists-of-dicts"],
)
async def test_nested_uuids_do_not_prevent_widening(
    persisting: Bucket, options: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    backend = persisting.open(**options)
    for row in rows:
        await backend.put(row)
    await backend.put_batch(rows)
    await check_everywhere(persisting, backend, rows * 2)


async def test_arrow_data_adds_new_fields(persisting: Bucket, options: dict[str, Any]) -> None:
    backend = persisting.open(**options)
    await backend.put({"a": 1})
    await backend.flush()
    await backend.put_arrow(pa.table({"b": ["x", "y"]}))
    await backend.put_arrow(pa.table({"a": [1.5], "c": [[{"d": 1}]]}))
    rows = [{"a": 1}, {"b": "x"}, {"b": "y"}, {"a": 1.5, "c": [{"d": 1}]}]
    await check_everywhere(persisting, backend, rows)


async def test_many_evolutions_in_a_row_keep_every_row(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(**options)
    rows: list[dict[str, Any]] = []
    for i in range(25):
        rows.append({"i": i if i < 12 else i + 0.5, f"f{i}": [i], "d": {f"k{i % 4}": i}})
        await backend.put(rows[-1])
        if i % 3 == 0:
            await backend.flush()
    await check_everywhere(persisting, backend, rows)


async def test_vector_of_another_length_turns_the_field_into_lists_with_one_warning(
    persisting: Bucket, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    backend = persisting.open(**options)
    await backend.put({"v": [0.5, 1.5]})
    await backend.flush()
    assert (await backend.get_arrow()).schema.field("v").type == pa.list_(pa.float64(), 2)
    with caplog.at_level("WARNING"):
        await backend.put({"v": [0.5]})
        await backend.put({"v": [0.5, 1.5, 2.5]})
    said = [r for r in caplog.records if "search" in r.getMessage()]
    assert len(said) == 1
    assert "'v'" in said[0].getMessage()
    await check_everywhere(
        persisting, backend, [{"v": [0.5, 1.5]}, {"v": [0.5]}, {"v": [0.5, 1.5, 2.5]}]
    )


async def test_defaults_fill_new_fields_of_records_stored_before(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    defaults = {"age": 0, "tags": ["none"], "where": {"city": "?"}, "id": U}
    backend = persisting.open(schema_defaults=defaults, **options)
    await backend.put({"name": "Alice"})
    await backend.flush()
    await backend.put({"name": "Bob"})
    await backend.put({"name": "Carol", "age": 30, "tags": [], "where": {"city": "X"}, "id": U})
    await backend.put({"name": "Dan"})
    await backend.put({"name": "Eve", "age": None, "tags": None, "where": None, "id": None})
    expected = [
        {"name": "Alice", **defaults},
        {"name": "Bob", **defaults},
        {"name": "Carol", "age": 30, "tags": [], "where": {"city": "X"}, "id": U},
        {"name": "Dan", **defaults},
        {"name": "Eve", "age": None, "tags": None, "where": None, "id": None},
    ]
    assert await backend.get() == expected
    await backend.flush()
    assert await backend.get() == expected
    backend = await persisting.reopen(backend, schema_defaults=defaults)
    assert await backend.get() == expected


@pytest.mark.parametrize("flushed", [True, False])
async def test_a_default_of_another_type_is_refused_at_opening(
    persisting: Bucket, flushed: bool
) -> None:
    backend = persisting.open(flush_interval=None, enable_wal=True)
    await backend.put({"a": 1})
    await backend.flush()
    await backend.put({"a": 2, "y": "text"})
    if flushed:
        await backend.flush()
    crashed = Bucket(persisting.kind, persisting.folder.with_name("crashed"))
    ignored = shutil.ignore_patterns(".lock")
    shutil.copytree(persisting.folder, crashed.folder, ignore=ignored)
    for logged in (True, False):
        with pytest.raises(InvalidArgument, match=r"schema_defaults: field 'y' is str.*7 is int"):
            crashed.open(schema_defaults={"y": 7}, enable_wal=logged)
    reopened = crashed.open(schema_defaults={"y": "none"})
    first = None if flushed else "none"
    assert await reopened.get() == [{"a": 1, "y": first}, {"a": 2, "y": "text"}]
    await crashed.close()


@pytest.mark.parametrize(
    ("stored", "default"),
    [(None, 7), ([], [1]), (1, 0.5), ({"a": 1}, {"a": 1, "b": 2}), ([0.5, 1.5], [0.5])],
    ids=str,
)
async def test_default_widens_its_field_as_a_record_does(
    persisting: Bucket, stored: Any, default: Any
) -> None:
    backend = persisting.open()
    await backend.put({"a": 1, "y": stored})
    backend = await persisting.reopen(backend, schema_defaults={"y": default})
    await backend.put({"a": 2})
    await backend.flush()
    backend = await persisting.reopen(backend)
    found = await backend.get()
    assert [one["a"] for one in found] == [1, 2]
    assert found[1]["y"] == default


async def test_default_alone_does_not_create_a_field(persisting: Bucket) -> None:
    backend = persisting.open(schema_defaults={"age": 0})
    await backend.put({"name": "Alice"})
    await backend.flush()
    assert await backend.get() == [{"name": "Alice"}]


async def test_a_default_fills_a_field_that_was_none_at_first(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(schema_defaults={"age": 0}, **options)
    await backend.put({"id": 1})
    await backend.put({"id": 2, "age": None})
    await backend.flush()
    await backend.put({"id": 3})
    await backend.put({"id": 4, "age": 5})
    ages = [0, None, 0, 5]
    assert [r["age"] for r in await backend.get()] == ages
    await backend.flush()
    assert [r["age"] for r in await backend.get()] == ages


async def test_a_value_that_its_default_contradicts_raises(
    persisting: Bucket, options: dict[str, Any]
) -> None:
    backend = persisting.open(schema_defaults={"age": 0}, **options)
    await backend.put({"id": 1})
    with pytest.raises(SchemaError, match="'age'"):
        await backend.put({"id": 2, "age": "old"})
    await backend.put({"id": 3, "age": 1.5})
    assert await backend.get() == [{"id": 1, "age": 0.0}, {"id": 3, "age": 1.5}]
    await backend.flush()
    assert await backend.get() == [{"id": 1, "age": 0.0}, {"id": 3, "age": 1.5}]


async def test_a_default_vector_is_stored_in_the_chosen_width(persisting: Bucket) -> None:
    backend = persisting.open(vector_type="float32", schema_defaults={"v": [0.1, 0.2]})
    await backend.put({"id": 1})
    await backend.flush()
    await backend.put({"id": 2, "v": [0.1, 0.2]})
    rows = await backend.get()
    assert rows[0]["v"] == rows[1]["v"]
    await backend.flush()
    assert await backend.get() == rows


async def test_old_versions_stay_readable(persisting: Bucket) -> None:
    import lance

    backend = persisting.open(flush_interval=None)
    table = str(persisting.folder / "data.lance")
    snapshots: dict[int, list[dict[str, Any]]] = {}
    rows = [{"a": 1}, {"a": 2, "b": "x"}, {"a": 2.5, "d": {"k": 1}}, {"d": {"l": [1]}, "a": 3.5}]
    for row in rows:
        await backend.put(row)
        await backend.flush()
        version = (await backend.stats())["version"]
        snapshots[version] = lance.dataset(table, version=version).to_table().to_pylist()
    await backend.close()
    assert len(snapshots) == len(rows)
    for number, (version, seen) in enumerate(snapshots.items(), start=1):
        assert lance.dataset(table, version=version).to_table().to_pylist() == seen
        assert len(seen) == number


@pytest.mark.parametrize(
    "new",
    [{"b": "text"}, {"d": {"y": 1}}, {"l": [{"y": 1}]}, {"n": {"m": {"y": 1}}}],
    ids=["top", "dict", "list-of-dicts", "deep"],
)
async def test_adding_a_field_does_not_rewrite_old_data(
    persisting: Bucket, new: dict[str, Any]
) -> None:
    backend = persisting.open(flush_interval=None)
    rows = [
        {"d": {"x": random.random()}, "l": [{"x": random.random()}], "n": {"m": {"x": i}}}
        for i in range(3000)
    ]
    await backend.put_batch(rows)
    await backend.flush()
    data = persisting.folder / "data.lance" / "data"
    before = {p.name: p.stat().st_size for p in data.iterdir()}
    await backend.put(new)
    await backend.flush()
    added = [p.stat().st_size for p in data.iterdir() if p.name not in before]
    assert sum(added) < sum(before.values()) / 5
    got = await backend.get()
    assert len(got) == 3001
    assert all(map(equal_but_for_absent, rows, got))
