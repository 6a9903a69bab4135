"""docs/guide/compression.md lists the codecs of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.doc_pages import both, code, tables

from persisting.options import COMPRESSIONS
from persisting.table.layout import _ENCODINGS, EFFECTIVE

OPTIONS = [None, *COMPRESSIONS]


@pytest.mark.parametrize("page", both("guide/compression.md"), ids=["en", "zh"])
def test_compression_table_matches_the_code(page: Path):
    rows = {eval(code(row[0])): row for row in tables(page)[0][1:]}  # noqa: S307
    assert set(rows) == set(OPTIONS)
    for option, row in rows.items():
        assert code(row[3]) == str(EFFECTIVE[option])
        chunk = _ENCODINGS[option].get(b"lance-encoding:minichunk-size")
        if chunk is not None and option != "zstd":
            assert f"{int(chunk) // 1024} KiB" in row[2]
