"""Reads the state of a torchdata ``StatefulDataLoader``: one state for each of its workers."""

from __future__ import annotations

from typing import Any

from persisting.data.schedule import Schedule
from persisting.data.stream_state import StreamState
from persisting.errors import InvalidArgument

_SNAPSHOT, _WORKERS, _SKIPPED = "_snapshot", "_worker_snapshots", "_steps_since_snapshot"
_DATASET = "dataset_state"


def is_of_loader(state: Any) -> bool:
    return isinstance(state, dict) and (_SNAPSHOT in state or _DATASET in state)


def stream_states(state: dict[str, Any]) -> tuple[list[Any], int]:
    """Return the states of the streams in the workers, and how many batches came after them."""
    try:
        if _SNAPSHOT not in state:
            return [state[_DATASET]], 0
        workers = state[_SNAPSHOT][_WORKERS]
        ordered = [workers[f"worker_{number}"] for number in range(len(workers))]
        return [worker[_DATASET] for worker in ordered], int(state[_SKIPPED])
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidArgument(
            f"this is not the state of a StatefulDataLoader that this version knows: {exc!r}"
        ) from exc


def place_of(states: list[StreamState], size: int, skipped: int) -> tuple[int, int]:
    """Return the epoch and the position that a loader had reached.

    Each worker knows its own next step. The workers take turns, so the first of these steps is the
    one that the loader would have delivered next.
    """
    places = [_next_step(number, state, size) for number, state in enumerate(states)]
    epoch, first, step = min(places, key=lambda place: (place[0], place[2]))
    return _position(states[0], epoch, first, step + skipped, size)


def _next_step(number: int, state: StreamState, size: int) -> tuple[int, int, int]:
    """Return a worker's next step: the epoch, the position from which its steps count, the step."""
    place = state.worker
    if place is None:
        raise InvalidArgument("a worker's state has no position; it is not from this loader")
    step = place.step + (number - place.turn) % place.count
    return _settled(state, state.epoch, state.position, step, size)


def _settled(
    state: StreamState, epoch: int, first: int, step: int, size: int
) -> tuple[int, int, int]:
    """Return a step that may be beyond its epoch as a step of the epoch that it belongs to.

    A step at the end of an epoch stays there, since the epoch may be the last. An epoch may have no
    steps left from ``first`` on: the state that was loaded was at its end.
    """
    steps, whole = _schedule(state, first, size).steps, _schedule(state, 0, size).steps
    while whole and step > steps:
        epoch, first, step, steps = epoch + 1, 0, step - steps, whole
    return epoch, first, step


def _position(state: StreamState, epoch: int, first: int, step: int, size: int) -> tuple[int, int]:
    epoch, first, step = _settled(state, epoch, first, step, size)
    return epoch, _schedule(state, first, size).start(step) if step else first


def _schedule(state: StreamState, first: int, size: int) -> Schedule:
    place = state.worker
    assert place is not None
    return Schedule(size, first, place.world_size, place.batch_size, place.remainder)
