"""A topic, or a tag of it, as a stream of batches."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from persisting.data.checks import (
    check_columns,
    check_count,
    check_fixed_where,
    check_rank,
    check_seed,
)
from persisting.data.followed_stream import FollowedStream
from persisting.data.formats import ARROW, NUMPY, PYTHON, TORCH, check_format, to_batch
from persisting.data.pin import pin_of
from persisting.data.pinned_stream import PinnedOptions, PinnedStream, StreamOptions, Worker
from persisting.data.place import place_of
from persisting.data.schedule import REMAINDERS, UNEVEN
from persisting.errors import InvalidArgument, StorageError
from persisting.options import check_timeout
from persisting.table.search import check_where


class TopicStream:
    """The rows of a topic as batches, shuffled and divided among ranks, resumable to the row.

    Iterating yields ``epochs`` epochs; iterating again continues with the epochs after them. An
    iteration that was left early is continued by the next one. In the workers of a torch
    ``DataLoader`` (``batch_size=None``) each worker reads its share, and the loader delivers the
    batches in the order that a single process would.

    All ranks advance in lock step, a batch each. :meth:`state_dict` says how far they all are;
    every rank of any world size can continue from it.

    Parameters
    ----------
    path : str | Path
        The topic's folder, or its address in an object store: ``<storage_path>/<topic>``.
    tag : str, optional
        Read what this tag holds; without it, what was flushed when the stream was created. Untagged
        versions are removed ``keep_versions`` seconds after newer ones replaced them.
    follow : bool, optional
        Read the topic from its first record on, and wait for new ones, instead of a fixed version.
        Each rank reads buckets of its own, and its state holds their offsets.
    batch_size : int, optional
        Rows in each batch of a rank. A following stream yields what has arrived, up to this many.
    columns : list of str, optional
        Read only these fields.
    where : str, optional
        Only rows that match this SQL condition.
    shuffle : int, optional
        The seed of a permutation of all rows, another one in each epoch; None: the stored order.
    rank, world_size : int, optional
        The number of this trainer, from 0, and the number of trainers.
    epochs : int, optional
        How many times an iteration reads all rows; None: it never ends.
    remainder : str, optional
        What happens to the rows that make no whole step of all ranks at the end of an epoch:
        "uneven" (default), "padded" or "dropped".
    format : str, optional
        What a batch is: "arrow" (default, a RecordBatch), "python" (a list of dicts), "numpy" or
        "torch" (a dict of columns).
    idle_timeout : float, optional
        End a following stream when no record has arrived for this many seconds; None: never.
    storage_options : dict, optional
        Credentials and settings for a topic in an object store; without them, those of the
        environment. They are pickled with the stream for its workers, and are in no state.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> TopicStream:
        if cls is TopicStream and "torch" in sys.modules:
            from persisting.data.torch_stream import TorchTopicStream

            return object.__new__(TorchTopicStream)
        return object.__new__(cls)

    def __init__(
        self,
        path: str | Path,
        tag: str | None = None,
        *,
        follow: bool = False,
        batch_size: int = 256,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        shuffle: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        remainder: str = UNEVEN,
        format: str = ARROW,
        idle_timeout: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_format(format, (ARROW, PYTHON, NUMPY, TORCH))
        check_count("batch_size", batch_size)
        check_rank(rank, world_size)
        check_where(where)
        names = check_columns(columns)
        self._format = format
        self._iterations = 0
        self._is_read_here = False
        self._shared_flag = mmap.mmap(-1, 1)
        """Set by a forked worker, whose position this process does not know."""
        self._spawned = False
        options = StreamOptions(names, where, batch_size, rank, world_size)
        self._stream: PinnedStream | FollowedStream
        if follow:
            _refuse("follow=True", tag=tag, shuffle=shuffle)
            _refuse_changed("follow=True", epochs=(epochs, 1), remainder=(remainder, UNEVEN))
            check_timeout(idle_timeout)
            self._stream = FollowedStream(place_of(path, storage_options), options, idle_timeout)
            return
        _refuse("a stream that does not follow", idle_timeout=idle_timeout)
        check_fixed_where(where)
        check_seed(shuffle)
        if epochs is not None:
            check_count("epochs", epochs)
        if remainder not in REMAINDERS:
            choices = ", ".join(map(repr, REMAINDERS))
            raise InvalidArgument(f"remainder must be one of {choices}, got {remainder!r}")
        pinned = PinnedOptions(shuffle, epochs, remainder)
        self._stream = PinnedStream(pin_of(path, tag, storage_options), options, pinned)

    def __getstate__(self) -> dict[str, Any]:
        if _is_being_sent():
            self._spawned = True
        state = dict(self.__dict__)
        del state["_shared_flag"]
        return {**state, "_spawned": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared_flag = mmap.mmap(-1, 1)

    @property
    def rows(self) -> int:
        """The number of rows of an epoch."""
        return self._pinned("rows").rows

    @property
    def schema(self) -> pa.Schema:
        """The fields of the rows."""
        return self._pinned("schema").schema

    def _pinned(self, what: str) -> PinnedStream:
        if isinstance(self._stream, FollowedStream):
            raise InvalidArgument(f"a stream with follow=True has no {what}: the topic grows")
        return self._stream

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        worker = self._worker()
        if worker is not None:
            self._shared_flag[0] = 1
        self._iterations += 1
        self._is_read_here = True
        return self._formatted(self._stream.batches(worker), self._iterations)

    def _formatted(self, batches: Iterator[pa.RecordBatch], iteration: int) -> Iterator[Any]:
        while True:
            # Checked first: taking a batch moves the position, which is not this iteration's.
            if iteration != self._iterations:
                raise StorageError(
                    "another iteration of this stream has begun, or its position was set, and this "
                    "one is over; create a stream for each of two loops that run at the same time"
                )
            batch = next(batches, None)
            if batch is None:
                return
            yield to_batch(batch, self._format)

    def _worker(self) -> Worker | None:
        """Return which worker of a loader this process is; None outside of a loader."""
        return None

    # State

    def set_epoch(self, epoch: int) -> None:
        """Continue with the first batch of an epoch, for example with a loader whose workers start
        again for each epoch."""
        pinned = self._pinned("epochs")
        pinned.set_epoch(check_count("epoch", epoch, least=0))
        self._iterations += 1  # an iteration that is under way ends

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return where the stream is: what it has yielded does not come again.

        It is JSON of at most 1 KB; with ``follow`` it has an offset for each bucket. If a loader
        reads the stream in workers, this process does not know what the loader has delivered: use
        the state of a torchdata ``StatefulDataLoader``, or pass the number of ``batches`` that the
        loader has delivered since the stream was created or a state was loaded.
        """
        if batches is not None:
            return self._stream.state(check_count("batches", batches, least=0))
        if (self._shared_flag[0] or self._spawned) and not self._is_read_here:
            raise InvalidArgument(
                "this stream is read in the workers of a loader, and only the loader knows how "
                "many batches it has delivered: call state_dict() of a torchdata "
                "StatefulDataLoader, or pass state_dict(batches=…)"
            )
        return self._stream.state()

    def load_state_dict(self, state: Any) -> None:
        """Continue at a state.

        It may come from any rank, of any world size, with any batch size and number of workers; the
        state of a torchdata ``StatefulDataLoader`` is accepted as well. A following stream takes
        its own state, or a list with the states of all ranks. A state of another topic, tag,
        condition or seed is refused.
        """
        self._stream.load(state)
        self._iterations += 1  # an iteration that is under way ends

    def __repr__(self) -> str:
        return f"<TopicStream of {self._stream.source}>"


def _is_being_sent() -> bool:
    """Whether a process is being spawned right now, which receives what is pickled."""
    from multiprocessing.context import get_spawning_popen

    return get_spawning_popen() is not None


def _refuse(user: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidArgument(f"{user} has no {name}, got {name}={value!r}")


def _refuse_changed(user: str, **arguments: tuple[Any, Any]) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise InvalidArgument(f"{user} has no {name}, got {name}={value!r}")
