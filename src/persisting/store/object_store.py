"""The calls on an object store: get, create, swap, list, delete. Blocking, from any thread.

Backups also read large objects in parts, upload them in parts, and have the store copy them.

``create`` stores an object only if there is none, ``swap`` only if the object is still the version
that the caller has read. An answer may be lost after the store has carried a request out. Both
calls then read the object back, and compare bytes: so every object needs bytes that no other writer
would write, such as a nonce. A call returns only if its bytes are stored, and raises
:class:`OutcomeUnknown` if that cannot be found out.

``obstore`` does the requests, always in blocking calls: its async calls can abort the process at
exit. Retries are made here, since only here is it known which outcome a retry may have.
"""

from __future__ import annotations

import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from persisting.errors import InvalidArgument, StorageError
from persisting.store.storage_options import StorageOptions
from persisting.store_address import SCHEMES, StoreAddress

_T = TypeVar("_T")

RETRY_SECONDS = 20.0
"""How long a call is retried before it raises."""

REQUEST_TIMEOUT = "10s"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_STATUS = re.compile(r"status(?: code)?:? (\d{3})")
_DENIED = "code: AccessDenied"
"""In the answer to a request that deletes several objects: its status is 200."""
_RETRIED_STATUSES = (408, 409, 425, 429)
"""The statuses between 400 and 499 that a later attempt may not meet."""
_DELETED_AT_ONCE = 1000
PART_BYTES = 8 * 1024 * 1024
"""Large objects are read and uploaded in parts of this size."""
LARGEST_COPY = 5 * 1024**3
"""S3 copies no larger object in one request."""
_COPY_TIMEOUT = "300s"
_TROUBLE_SECONDS = 30.0
"""How long a failure counts as present unless a request was tried since."""


class StoreError(StorageError):
    """An object store refused a call, cannot be reached, or cannot be used."""


class OutcomeUnknown(StoreError):
    """It is unknown whether an object was stored: no answer arrived, and it could not be read
    back."""


class ObjectExists(Exception):
    """There is another object under the name that was to be created."""

    def __init__(self, found: StoredObject) -> None:
        super().__init__("the object exists")
        self.found = found


class ObjectChanged(Exception):
    """The object is not the version that was to be replaced; ``found`` is what is there now."""

    def __init__(self, found: StoredObject | None) -> None:
        super().__init__("the object has changed")
        self.found = found


class ObjectVersion(NamedTuple):
    """Identifies the content of an object, for the next :meth:`ObjectStore.swap`."""

    e_tag: str | None
    generation: str | None


class StoredObject(NamedTuple):
    data: bytes
    version: ObjectVersion


class Entry(NamedTuple):
    """An object in a listing."""

    e_tag: str | None
    size: int
    modified: float
    """When it was stored, in seconds by the clock of the store: to be compared only with the times
    of other objects."""


class ObjectStore:
    """The objects below one address."""

    def __init__(
        self,
        address: StoreAddress,
        options: StorageOptions,
        client: Any,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """``client`` is a store of ``obstore`` whose root is the address."""
        self.address, self.options = address, options
        self._client, self._retry_seconds = client, retry_seconds
        self._process = os.getpid()
        self._troubles: dict[str, tuple[float, str]] = {}
        """By action, when it last failed and why; empty once it succeeds."""

    def __repr__(self) -> str:
        return f"ObjectStore({str(self.address)!r})"

    @property
    def trouble(self) -> str:
        """Why calls that are being retried fail at present; empty if none is known to fail."""
        troubles = list(self._troubles.values())
        if not troubles:
            return ""
        at, reason = max(troubles)
        return reason if time.monotonic() - at < _TROUBLE_SECONDS else ""

    def _failed(self, action: str, key: str, exc: Exception) -> None:
        said = (
            exc if isinstance(exc, StoreError) else f"cannot {action} {self.address / key}: {exc}"
        )
        self._troubles[action] = time.monotonic(), str(said)

    def get(self, key: str) -> StoredObject | None:
        """Return an object, None if there is none."""
        import obstore

        def attempt() -> StoredObject | None:
            try:
                answer = obstore.get(self._client, key)
                return StoredObject(bytes(answer.bytes()), _version_of(answer.meta))
            except FileNotFoundError:
                return None

        return self._retried("read", key, attempt)

    def create(self, key: str, data: bytes) -> ObjectVersion:
        """Store an object that does not exist yet; raise :class:`ObjectExists` if another does."""

        def resolve() -> ObjectVersion | None:
            found = self.get(key)
            if found is None:
                return None  # refused because of a request at the same time, or never arrived
            if found.data != data:
                raise ObjectExists(found)
            return found.version

        return self._put(key, data, "create", resolve)

    def swap(self, key: str, data: bytes, version: ObjectVersion) -> ObjectVersion:
        """Replace the version of an object that was read; raise :class:`ObjectChanged` if it is no
        longer there.

        If the answer is lost and others have replaced the new bytes since, this also raises
        :class:`ObjectChanged`, although the bytes were there for a while.
        """

        def resolve() -> ObjectVersion | None:
            found = self.get(key)
            if found is not None and found.data == data:
                return found.version
            if found is None or found.version != version:
                raise ObjectChanged(found)
            return None

        mode = {"e_tag": version.e_tag, "version": version.generation}
        return self._put(key, data, {k: v for k, v in mode.items() if v is not None}, resolve)

    def list(self, prefix: str, after: str | None = None) -> list[str]:
        """Return the sorted names of all objects below ``prefix``, or of those that sort after
        ``after``."""
        import obstore

        def attempt() -> list[str]:
            chunks = obstore.list(self._client, prefix=prefix, offset=after)
            return sorted(entry["path"] for chunk in chunks for entry in chunk)

        return self._retried("list", prefix, attempt)

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Return all objects below ``prefix``, by name."""
        import obstore

        def attempt() -> dict[str, Entry]:
            return {
                entry["path"]: _entry_of(entry)
                for chunk in obstore.list(self._client, prefix=prefix)
                for entry in chunk
            }

        return self._retried("list", prefix, attempt)

    # Large objects, which nobody changes once they are stored

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, None if there is none."""
        import obstore

        def attempt() -> int | None:
            try:
                return int(obstore.head(self._client, key)["size"])
            except FileNotFoundError:
                return None

        return self._retried("read", key, attempt)

    def parts(self, key: str) -> Iterator[bytes]:
        """Yield the bytes of an object in parts; raise :class:`FileNotFoundError` before the first
        if there is none."""
        import obstore

        size = self.size(key)
        if size is None:
            raise FileNotFoundError(f"there is no object {self.address / key}")

        def attempt(begin: int) -> bytes:
            length = min(PART_BYTES, size - begin)
            return bytes(obstore.get_range(self._client, key, start=begin, length=length))

        for begin in range(0, size, PART_BYTES):
            yield self._retried("read", key, lambda begin=begin: attempt(begin))  # type: ignore[misc]

    def upload(self, key: str, parts: Callable[[], Iterator[bytes | memoryview]]) -> None:
        """Store an object of any size, over another one; ``parts`` is called for each attempt."""
        import obstore

        def attempt() -> None:
            with _read_ahead(parts) as read:
                obstore.put(
                    self._client,
                    key,
                    read,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=4,
                )

        self._retried("write", key, attempt)

    def can_copy_from(self, other: ObjectStore) -> bool:
        """Whether the store can copy objects of ``other`` here by itself."""
        there, here = other.address, self.address
        same_bucket = (there.scheme, there.bucket) == (here.scheme, here.bucket)
        return same_bucket and other.options == self.options

    def copy_from(self, other: ObjectStore, key: str, name: str) -> None:
        """Have the store copy an object of ``other``, of at most :data:`LARGEST_COPY` bytes."""
        import obstore

        source, target = (other.address / key).prefix, (self.address / name).prefix

        def attempt() -> None:
            obstore.copy(self._whole_bucket._client, source, target)

        self._retried("copy", key, attempt)

    @cached_property
    def _whole_bucket(self) -> ObjectStore:
        """The bucket that this store is a part of; a copy of a large object is slow."""
        root = StoreAddress(self.address.scheme, self.address.bucket)
        return open_store(root, self.options, self._retry_seconds, timeout=_COPY_TIMEOUT)

    def folders(self) -> Sequence[str]:
        """Return the first parts of the names that have several, sorted."""
        import obstore

        def attempt() -> Sequence[str]:
            found = obstore.list_with_delimiter(self._client)["common_prefixes"]
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

        return self._retried("list", "", attempt)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""
        import obstore

        names = list(keys)
        for begin in range(0, len(names), _DELETED_AT_ONCE):
            some = names[begin : begin + _DELETED_AT_ONCE]

            def attempt(some: list[str] = some) -> None:
                try:
                    obstore.delete(self._client, some)
                except FileNotFoundError:  # not from S3; the names after it may be untouched
                    for name in some:
                        with suppress(FileNotFoundError):
                            obstore.delete(self._client, name)

            self._retried("delete", some[0], attempt)

    # Attempts

    def _put(
        self, key: str, data: bytes, mode: Any, resolve: Callable[[], ObjectVersion | None]
    ) -> ObjectVersion:
        """Put until the object is stored, or something else is known to be there.

        ``resolve`` reads the object back: it returns the version if the bytes are ours, None if the
        same put may be tried again, and raises if another object is there.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        attempts = _Attempts(self._retry_seconds)
        uncertain = False
        while True:
            self._check_process()
            reason: object = "the store refuses it without an object in its place"
            try:
                with self._translated("write", key, conditional=True):
                    answer = obstore.put(self._client, key, data, mode=mode, use_multipart=False)
                self._troubles.pop("write", None)
                return _version_of(answer)
            except (AlreadyExistsError, PreconditionError):
                pass
            except FileNotFoundError:
                if mode != "create":
                    raise ObjectChanged(None) from None
                missing = self._no_bucket()
                raise (self._unknown(key, missing) if uncertain else missing) from None
            except _Temporary as exc:
                uncertain, reason = True, exc
                self._failed("write", key, exc)
            except StoreError as exc:
                self._failed("write", key, exc)
                raise (self._unknown(key, exc) if uncertain else exc) from None
            try:
                version = resolve()
            except StoreError as unreadable:
                raise self._unknown(key, unreadable) from None
            if version is not None:
                return version
            if attempts.over:
                raise self._unknown(key, reason)
            attempts.pause()

    def _retried(self, action: str, key: str, attempt: Callable[[], _T]) -> _T:
        attempts = _Attempts(self._retry_seconds)
        while True:
            self._check_process()
            try:
                with self._translated(action, key):
                    done = attempt()
                self._troubles.pop(action, None)
                return done
            except StoreError as exc:
                self._failed(action, key, exc)
                raise
            except _Temporary as exc:
                self._failed(action, key, exc)
                if attempts.over:
                    raise StoreError(
                        f"cannot {action} {self.address / key}: {exc}; check the store and the "
                        "network, and try again"
                    ) from None
                attempts.pause()

    @contextmanager
    def _translated(self, action: str, key: str, *, conditional: bool = False) -> Iterator[None]:
        """Raise an error of the client as :class:`_Temporary` or as :class:`StoreError`.

        "Not found" and the answers to a condition stay as they are.
        """
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            PermissionDeniedError,
            PreconditionError,
            UnauthenticatedError,
        )

        try:
            yield
        except FileNotFoundError:
            raise
        except (AlreadyExistsError, PreconditionError) as exc:
            if conditional:
                raise
            raise _Temporary(self._reason(exc)) from None  # 409 without a condition: try again
        except (PermissionError, PermissionDeniedError, UnauthenticatedError) as exc:
            raise self._refused(action, key, exc) from None
        except (BaseError, OSError, NotImplementedError) as exc:
            if _DENIED in str(exc):
                raise self._refused(action, key, exc) from None
            if _is_permanent(exc):
                raise StoreError(
                    f"cannot {action} {self.address / key}: {self._reason(exc)}; check "
                    "storage_options"
                ) from None
            raise _Temporary(self._reason(exc)) from None

    def _refused(self, action: str, key: str, exc: BaseException) -> StoreError:
        return StoreError(
            f"{SCHEMES[self.address.scheme]} refuses to {action} {self.address / key}: "
            f"{self._reason(exc)}; check the credentials in storage_options or in the "
            "environment, and their permissions"
        )

    def _reason(self, exc: BaseException) -> str:
        """Return the first lines of a client's error, without secrets. Its cause is dropped for the
        same reason: a traceback would show it."""
        return self.options.scrub(str(exc).partition("\n\nDebug source")[0].strip())[:500]

    def _unknown(self, key: str, reason: object) -> OutcomeUnknown:
        return OutcomeUnknown(f"it is unknown whether {self.address / key} was stored: {reason}")

    def _no_bucket(self) -> StoreError:
        is_azure = self.address.scheme == "az"
        kind, more = ("container", "account") if is_azure else ("bucket", "region")
        return StoreError(
            f"there is no {kind} {self.address.bucket!r} for {self.address}; create it first, and "
            f"check the endpoint and the {more}"
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(
                f"the connection to {self.address} belongs to process {self._process}, which this "
                "one was forked from; open the topic in the process that uses it"
            )


class _Temporary(Exception):
    """A failure that a later attempt may not meet. The request may have been carried out."""


class _Attempts:
    """The pauses between attempts, and when to give up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._pause = _FIRST_PAUSE

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def pause(self) -> None:
        time.sleep(self._pause * random.uniform(0.5, 1))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


@contextmanager
def _read_ahead(
    parts: Callable[[], Iterator[bytes | memoryview]],
) -> Iterator[Iterator[bytes | memoryview]]:
    """Yield an iterator over ``parts()``, which a thread of its own reads: the client takes the
    parts in a thread that must not make requests."""
    waiting: queue.Queue[Any] = queue.Queue(maxsize=2)
    stopped = threading.Event()

    def put(item: Any) -> bool:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            for part in parts():
                if not put(part):
                    return
            put(None)
        except BaseException as exc:
            put(exc)

    failed: list[BaseException] = []

    def taken() -> Iterator[bytes | memoryview]:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                failed.append(item)
                raise item
            yield item

    thread = threading.Thread(target=read, name="persisting-upload", daemon=True)
    thread.start()
    try:
        yield taken()
    except Exception:
        if failed:  # the client may report it as an error of its own
            raise failed[0] from None
        raise
    finally:
        stopped.set()
        thread.join()


def _entry_of(meta: Any) -> Entry:
    return Entry(meta.get("e_tag"), meta["size"], meta["last_modified"].timestamp())


def _version_of(meta: Any) -> ObjectVersion:
    return ObjectVersion(meta.get("e_tag"), meta.get("version"))


def _is_permanent(exc: BaseException) -> bool:
    """Whether the request was refused, and would be again."""
    text = str(exc)
    status = _STATUS.search(text)
    if status is not None:
        code = int(status[1])
        return code == 501 or (code < 500 and code not in _RETRIED_STATUSES)
    return isinstance(exc, NotImplementedError) or "builder error" in text


def open_store(
    address: StoreAddress,
    options: StorageOptions,
    retry_seconds: float | None = None,
    timeout: str = REQUEST_TIMEOUT,
) -> ObjectStore:
    """Return the store at an address. No request is made. Requests that fail are repeated for
    ``retry_seconds``, by default :data:`RETRY_SECONDS`."""
    if retry_seconds is None:
        retry_seconds = RETRY_SECONDS
    options = options.for_scheme(address.scheme)
    try:
        from obstore import store as stores
        from obstore.exceptions import BaseError
    except ImportError:
        raise InvalidArgument(
            f"{address} is in an object store, which needs the package obstore: "
            "pip install 'persisting[store]'"
        ) from None
    kinds: dict[str, Any] = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
    client_options = {"timeout": timeout, **options.client_options}
    try:
        client = kinds[address.scheme](
            address.bucket,
            prefix=address.prefix or None,
            config=options.config,
            client_options=client_options,
            retry_config={"max_retries": 0},
        )
    except (BaseError, ValueError, TypeError) as exc:
        reason = options.scrub(str(exc).partition("\n\nDebug source")[0])
        raise InvalidArgument(f"storage_options for {address}: {reason}") from None
    return ObjectStore(address, options, client, retry_seconds)
