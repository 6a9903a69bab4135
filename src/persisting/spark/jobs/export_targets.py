"""The folder that an export goes to: what may be there, and how it is replaced."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from persisting.errors import InvalidArgument
from persisting.fs import remove_all
from persisting.options import local_path
from persisting.spark.jobs.file_formats import PARQUET, layouts, named_format
from persisting.topic.spec import FILE
from persisting.topic.topic_names import check_name

MODES = ("error", "overwrite", "append")


def target_of(path: str | Path) -> Path:
    """The folder of an export; raises where a topic lies in it, or around it."""
    root = local_path("path", str(path).removeprefix("file://"))
    there = next(one for one in (root, *root.parents) if one.exists())
    if not there.is_dir():
        raise InvalidArgument(f"{there} is a file; an export goes to a folder, name another one")
    topic = next((one for one in (root, *root.parents) if (one / FILE).exists()), None)
    topic = topic or next((Path(p) for p, _, names in os.walk(root) if FILE in names), None)
    if topic is not None:
        raise InvalidArgument(
            f"{root} cannot be written to: {topic} is a topic; name a folder beside the topics"
        )
    return root


def part_targets(
    output: str | Path, parts: Iterable[str], format: str | None, mode: str
) -> dict[str, Path]:
    """The folders of the parts of a split; what is wrong with any of them is raised first."""
    found = {name: target_of(Path(output) / check_name("part", name)) for name in parts}
    for place in found.values():
        check_mode(place, mode, named_format(format, place) or PARQUET, ())
    return found


def check_mode(root: Path, mode: str, chosen: str, by: Sequence[str]) -> None:
    """Raise where ``mode`` does not allow what is there."""
    if mode == "error" and root.exists() and any(root.iterdir()):
        raise InvalidArgument(f"{root} is there already; say mode='overwrite' or 'append'")
    if mode == "append":
        for kind, columns in sorted(layouts(root)):
            if (kind, columns) != (chosen, tuple(by)):
                named = f"partition_by={list(columns)!r}" if columns else "no partition_by"
                raise InvalidArgument(
                    f"{root} holds files of the format {kind} with {named}, to which those of "
                    f"{chosen} with {list(by)!r} cannot be added: say the same, or another folder"
                )


def replaced(root: Path, write: Callable[[Path], int]) -> int:
    """Have something written into a new folder and put in the place of what is in ``root``.

    If that fails, what is there stays.
    """
    is_new, staging = not root.exists(), root / f"_new-{uuid.uuid4().hex}"
    try:
        rows = write(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                root.rmdir()
        raise
    for one in list(root.iterdir()):
        if one != staging:
            remove_all(one)
    for one in list(staging.iterdir()):
        one.rename(root / one.name)
    staging.rmdir()
    return rows
