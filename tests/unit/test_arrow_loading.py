"""Processes of persisting load Arrow and Lance without pandas; those of the user do not change."""

from __future__ import annotations

from pathlib import Path

from support import children

LOADED = """
import sys
from persisting.arrow_loading import load_without_pandas
load_without_pandas()
import lance, pyarrow as pa
assert pa.array([1, None, 3]).to_pylist() == [1, None, 3]
print("pandas" in sys.modules, any("Hidden" in type(f).__name__ for f in sys.meta_path))
import pandas
print(pa.table({"a": [1]}).to_pandas()["a"].tolist())
"""

LOADED_ALREADY = """
import pandas
from persisting.arrow_loading import load_without_pandas
load_without_pandas()
import pyarrow as pa
print(pa.array(pandas.Series([1.0, None])).null_count)
"""


def test_lance_is_loaded_without_pandas_which_can_be_imported_later() -> None:
    assert children.run(LOADED).split() == ["False", "False", "[1]"]


def test_pandas_that_is_loaded_already_is_recognized() -> None:
    assert children.run(LOADED_ALREADY).split() == ["1"]


COMMAND = """
import sys
from persisting.cli import main
sys.argv[1:] = ["put", "t", sys.argv[1], "-s", sys.argv[2]]
try:
    main()
finally:
    print("pandas" in sys.modules)
"""


def test_commands_load_no_pandas(tmp_path: Path) -> None:
    (tmp_path / "given.jsonl").write_text('{"id": "a"}\n')
    out = children.run(COMMAND, tmp_path / "given.jsonl", tmp_path / "queues")
    assert out.startswith("1 record acknowledged")
    assert out.endswith("False\n")
