"""Push-down of columns and conditions by Spark itself, through a few Java classes of our own.

Spark does not tell a Python source what a query needs. The classes in ``jvm/`` give every scan of a
topic a table that Spark's own rules ask for columns and conditions. They are compiled once on this
machine by Janino, the compiler that Spark ships for its generated code, and cached by the versions
of Spark and of the sources. Where that is not possible, topics are read as without them.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persisting.spark.java import cache_folder
from persisting.store_address import is_store_address, parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXTENSION = "persisting.spark.PruningExtension"
EXTENSIONS = "spark.sql.extensions"
SETTING = "spark.persisting.pruning"
CATALOG = "persisting"
"""The name of the catalog of topics in SQL."""

_SOURCES = Path(__file__).with_name("jvm")
_log = logging.getLogger("persisting.spark")
_reported = False


def install_pruning(spark: SparkSession) -> bool:
    """Let a running session push columns and conditions down to topics; return whether it does.

    A session of :func:`persisting.spark.session` already does so. Batch reads are pruned from the
    next query on; streams only in a session that was created by :func:`session`. A Spark Connect
    server must have been started with the extension, see :mod:`persisting.spark.compile_classes`.
    ``spark.persisting.pruning=false`` turns it off.
    """
    session = getattr(spark, "_jsparkSession", None)
    if session is None:
        if EXTENSION in (spark.conf.get(EXTENSIONS, "") or "").split(","):
            return True
        _say("the Spark Connect server was started without our extension")
        return False
    if not load_classes():
        return False
    try:
        extension = _loader().loadClass(EXTENSION)
        method = extension.getMethod("install", _array("java.lang.Class", session.getClass()))
        method.invoke(None, _array("java.lang.Object", session))
    except Exception as exc:
        _say(exc)
        return False
    return True


def catalog_settings(topics: str | Path) -> dict[str, str]:
    """Return the settings of a catalog with the topics of a folder or of an object store."""
    prefix = f"spark.sql.catalog.{CATALOG}"
    place = str(parse(str(topics)) if is_store_address(str(topics)) else Path(topics).absolute())
    return {prefix: "persisting.spark.TopicCatalog", f"{prefix}.path": place}


def load_classes() -> bool:
    """Let this process's Java find our classes; return whether it does."""
    try:
        loader = _loader()
        if _is_loaded(loader):
            return True
        loader.addURL(_java().java.io.File(str(_compiled(loader))).toURI().toURL())
        return _is_loaded(loader)
    except Exception as exc:  # an unknown version of Spark or Java may fail in any way
        _say(exc)
        return False


def compiled_classes() -> Path:
    """Return the folder of our compiled classes, for another Java of the same Spark."""
    return _compiled(_loader())


def _compiled(loader: Any) -> Path:
    """Return the folder with our compiled classes; compile them unless they exist."""
    import pyspark

    sources = sorted(_SOURCES.glob("*.java"))
    key = hashlib.sha256(pyspark.__version__.encode())
    for source in sources:
        key.update(source.read_bytes())
    try:
        cache = cache_folder("spark")
    except OSError:  # there is no writable home, as in many containers
        cache = Path(tempfile.mkdtemp(prefix="persisting-classes-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    folder = cache / f"{pyspark.__version__}-{key.hexdigest()[:16]}"
    if folder.exists():
        return folder
    draft = Path(tempfile.mkdtemp(dir=cache))
    try:
        _compile(loader, sources, draft)
        os.rename(draft, folder)
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _compile(loader: Any, sources: list[Path], folder: Path) -> None:
    java, janino = _java().java.io, _java().org.codehaus.janino
    compiler = janino.Compiler()
    compiler.setIClassLoader(janino.ClassLoaderIClassLoader(loader))
    compiler.setSourceVersion(8)
    compiler.setTargetVersion(8)
    compiler.setDestinationDirectory(java.File(str(folder)), False)
    compiler.compile(_array("java.io.File", *(java.File(str(source)) for source in sources)))


def _java() -> Any:
    from pyspark import SparkContext

    return SparkContext._jvm


def _loader() -> Any:
    return _java().java.lang.Thread.currentThread().getContextClassLoader()


def _is_loaded(loader: Any) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        return loader.loadClass(EXTENSION) is not None
    except Py4JJavaError:
        return False


def _array(name: str, *items: Any) -> Any:
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    kind = gateway.jvm
    for part in name.split("."):
        kind = getattr(kind, part)
    array = gateway.new_array(kind, len(items))
    for place, item in enumerate(items):
        array[place] = item
    return array


def _say(why: object) -> None:
    """Say once, at debug level, why columns and conditions are not pushed down."""
    global _reported
    if not _reported:
        _reported = True
        _log.debug("Spark reads all columns of topics: %s", why)
