"""The target folder of an export: checks of its content, and its replacement."""

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


def export_folder(path: str | Path) -> Path:
    """Return the folder of an export; raise if it contains a topic, or is inside one."""
    root = local_path("path", str(path).removeprefix("file://"))
    nearest = next(path for path in (root, *root.parents) if path.exists())
    if not nearest.is_dir():
        raise InvalidArgument(f"{nearest} is a file; name a folder for the export")
    topic = next((path for path in (root, *root.parents) if (path / FILE).exists()), None)
    topic = topic or next((Path(p) for p, _, names in os.walk(root) if FILE in names), None)
    if topic is not None:
        raise InvalidArgument(
            f"cannot export to {root}: {topic} is a topic; name a folder outside of the topics"
        )
    return root


def part_targets(
    output: str | Path, parts: Iterable[str], format: str | None, mode: str
) -> dict[str, Path]:
    """Return the folders of the parts of a split; raise if any of them cannot be written."""
    targets = {name: export_folder(Path(output) / check_name("part", name)) for name in parts}
    for target in targets.values():
        check_mode(target, mode, named_format(format, target) or PARQUET, ())
    return targets


def check_mode(root: Path, mode: str, chosen: str, by: Sequence[str]) -> None:
    """Raise if ``mode`` does not allow what the folder contains."""
    if mode == "error" and root.exists() and any(root.iterdir()):
        raise InvalidArgument(f"{root} already exists; use mode='overwrite' or 'append'")
    if mode == "append":
        for kind, columns in sorted(layouts(root)):
            if (kind, columns) != (chosen, tuple(by)):
                partitions = f"partition_by={list(columns)!r}" if columns else "no partition_by"
                raise InvalidArgument(
                    f"{root} holds files of the format {kind} with {partitions}, to which files of "
                    f"the format {chosen} with partition_by={list(by)!r} cannot be added. Use the "
                    "same format and partition_by, or another folder"
                )


def write_and_replace(root: Path, write: Callable[[Path], int]) -> int:
    """Call ``write`` with a new folder, then replace the content of ``root`` with what it wrote.

    If ``write`` fails, ``root`` stays as it is.
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
    for entry in list(root.iterdir()):
        if entry != staging:
            remove_all(entry)
    for entry in list(staging.iterdir()):
        entry.rename(root / entry.name)
    staging.rmdir()
    return rows
