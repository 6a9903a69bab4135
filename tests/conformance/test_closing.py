"""Closing a backend, and calls after that."""

from __future__ import annotations

import pyarrow as pa
import pytest
from support.buckets import Bucket

from persisting.queue import BucketClosed, StorageError


async def test_close_may_be_called_twice(bucket: Bucket) -> None:
    backend = bucket.open()
    await backend.put({"a": 1})
    await backend.close()
    await backend.close()


async def test_unused_backend_can_be_closed(bucket: Bucket) -> None:
    await bucket.open().close()


async def test_async_with_closes_the_backend(bucket: Bucket) -> None:
    async with bucket.open() as backend:
        await backend.put({"a": 1})
    with pytest.raises(BucketClosed):
        await backend.put({"a": 2})


async def test_async_with_closes_when_its_body_raises(bucket: Bucket) -> None:
    backend = bucket.open()

    async def fail_inside() -> None:
        async with backend:
            await backend.put({"a": 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    with pytest.raises(BucketClosed):
        await backend.get()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda b: b.put({"a": 1}), id="put"),
        pytest.param(lambda b: b.put_batch([{"a": 1}]), id="put_batch"),
        pytest.param(lambda b: b.put_batch([]), id="put_batch-nothing"),
        pytest.param(lambda b: b.put_arrow(pa.table({"a": [1]})), id="put_arrow"),
        pytest.param(lambda b: b.get(), id="get"),
        pytest.param(lambda b: b.get(5, 0), id="get-nothing"),
        pytest.param(lambda b: b.get_arrow(), id="get_arrow"),
        pytest.param(lambda b: b.flush(), id="flush"),
        pytest.param(lambda b: anext(b.get_stream()), id="stream"),
    ],
    ids=[
        "put",
        "put_batch",
        "no_batch",
        "put_arrow",
        "get",
        "window",
        "get_arrow",
        "flush",
        "stream",
    ],
)
async def test_calls_after_close_raise(bucket: Bucket, call: object) -> None:
    backend = bucket.open()
    await backend.put({"a": 0})
    await backend.close()
    with pytest.raises(BucketClosed, match="closed") as caught:
        await call(backend)  # type: ignore[operator]
    assert isinstance(caught.value, StorageError)


async def test_close_flushes_the_buffer(stored: Bucket) -> None:
    backend = stored.open()
    await backend.put({"a": 1})
    await backend.close()
    stats = await stored.open().stats()
    assert (stats["persisted_count"], stats["buffer_count"]) == (1, 0)
