"""The public names, and what importing them loads."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from support.children import run

import persisting
from persisting import errors, queue

HEAVY = ["lance", "pyarrow", "numpy", "pulsing", "pyspark", "pandas", "prometheus_client"]


def test_all_of_persisting_can_be_imported() -> None:
    assert sorted(persisting.__all__) == persisting.__all__
    for name in persisting.__all__:
        assert getattr(persisting, name) is not None


def test_all_of_persisting_queue_can_be_imported() -> None:
    assert sorted(queue.__all__) == queue.__all__
    for name in queue.__all__:
        assert getattr(queue, name) is not None
    assert set(queue.__all__) <= set(dir(queue))


def test_persisting_exposes_only_the_names_in_its_all() -> None:
    package = Path(persisting.__file__).parent
    modules = {path.stem for path in package.iterdir() if not path.name.startswith("_")}
    visible = {n for n in vars(persisting) if not n.startswith("_")} - modules
    assert visible <= set(persisting.__all__)


def test_all_names_of_the_specification_are_exported() -> None:
    for name in ("LanceBackend", "PersistingBackend", "MemoryBackend", "StorageBackend"):
        assert inspect.isclass(getattr(queue, name))
    assert issubclass(queue.WALError, queue.StorageError)
    assert issubclass(queue.StorageError, Exception)


def test_every_error_is_exported_by_both_modules() -> None:
    tree = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert tree <= set(queue.__all__)
    assert tree <= set(persisting.__all__)
    for name in tree:
        error = getattr(errors, name)
        assert getattr(queue, name) is error
        assert getattr(persisting, name) is error
        assert issubclass(error, errors.StorageError)


def test_the_errors_docstring_shows_every_class() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert name in (errors.__doc__ or ""), name


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchBackend"):
        _ = queue.NoSuchBackend


@pytest.mark.parametrize("module", ["persisting", "persisting.queue", "persisting.errors"])
def test_importing_a_module_loads_no_heavy_dependency(module: str) -> None:
    code = (
        "import sys, importlib; importlib.import_module(sys.argv[1]);"
        "print([m for m in sys.argv[2:] if m in sys.modules])"
    )
    assert run(code, module, *HEAVY).strip() == "[]"


def test_using_a_backend_loads_neither_pulsing_nor_spark() -> None:
    code = (
        "import sys, asyncio, persisting\n"
        "b = persisting.queue.PersistingBackend(0, sys.argv[1], enable_wal=True)\n"
        "asyncio.run(b.put({'a': 1})); asyncio.run(b.close())\n"
        "print([m for m in ('pulsing', 'pyspark') if m in sys.modules])"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert run(code, folder).strip() == "[]"


def test_the_log_imports_neither_arrow_nor_lance() -> None:
    code = (
        "import sys, persisting.wal, persisting.wal.recovery;"
        "print([m for m in ('pyarrow', 'lance', 'pulsing') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_every_module_has_a_docstring() -> None:
    for path in Path(persisting.__file__).parent.rglob("*.py"):
        source = path.read_text()
        assert not source or ast.get_docstring(ast.parse(source)), path
