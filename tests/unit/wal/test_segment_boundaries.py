"""Recovery at the boundary of two segments, and files that are not segments."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.log_builder import make_log, recover, trimmed

from persisting.errors import WALError

A, B, C = b"aaaa", b"bbbb", b"cccc"


def test_garbage_at_the_end_of_a_segment_is_trimmed_where_the_next_segment_continues(
    tmp_path: Path,
) -> None:
    _, middle, _ = make_log(tmp_path, [A], [B], [C])
    middle.write_bytes(middle.read_bytes() + b"half a frame")
    rows, _ = recover(tmp_path)
    assert rows == [A, B, C]
    assert trimmed(tmp_path) == [b"half a frame"]


def test_wal_file_whose_name_is_not_a_segment_name_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path, [A])
    (tmp_path / "copy.wal").write_bytes(b"")
    with pytest.raises(WALError, match=r"copy\.wal"):
        recover(tmp_path)
