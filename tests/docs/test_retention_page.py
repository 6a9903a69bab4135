"""docs/guide/retention.md states the options and numbers of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from support.doc_pages import both, code, table_with

from persisting.backends import bucket_reader
from persisting.bucket import maintenance
from persisting.options import MIB, BucketOptions
from persisting.table import compaction
from persisting.table.retention import Limits

pages = pytest.mark.parametrize("page", both("guide/retention.md"), ids=["en", "zh"])


@pages
def test_retention_page_lists_the_options_with_their_defaults(page: Path):
    listed = {
        code(row[0]): eval(code(row[1]))  # noqa: S307
        for row in table_with(page, "retention_rows", "keep_versions")
    }
    kept = ("retention", "compaction", "keep_versions")
    fields = {f.name: f.default for f in dataclasses.fields(BucketOptions)}
    assert listed == {k: v for k, v in fields.items() if k.startswith(kept)}


@pages
def test_retention_page_states_the_numbers_of_the_code(page: Path):
    text = page.read_text("utf-8")
    assert f"{compaction.FULL_ROWS:,}" in text
    assert f"{compaction.FULL_BYTES // MIB} MiB" in text
    assert re.search(rf"\b{compaction._MANY} ", text)
    assert f"{maintenance._MIN_FRAGMENT_ROWS:,}" in text
    assert maintenance._FRAGMENTS_KEPT == 8
    assert re.search(rf" {maintenance._LONGEST_PAUSE:.0f}\b", text)
    assert re.search(rf" {bucket_reader._SNAPSHOT_SECONDS:.0f} ", text)
    assert maintenance._pause(600.0, None) == maintenance._pause(6000.0, None) == 60.0
    assert maintenance._pause(None, None) <= 60.0
    assert (maintenance._pause(None, 10.0), maintenance._pause(None, 0.01)) == (1.0, 0.2)


def test_compaction_limits_fragments_to_an_eighth_of_the_retention_limit():
    assert maintenance._fragment_limit(Limits(rows=80_000)).rows == 10_000
    assert maintenance._fragment_limit(Limits(rows=100)).rows == 1024
    assert maintenance._fragment_limit(Limits(nbytes=8 * MIB)).nbytes == MIB
    assert maintenance._fragment_limit(Limits()) == (compaction.FULL_ROWS, compaction.FULL_BYTES)
