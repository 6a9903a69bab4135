"""Prints the arguments with which a Spark Connect server that is started apart has our extension:

    "$SPARK_HOME/sbin/start-connect-server.sh" $(python -m persisting.spark.compile_classes)

It compiles our Java classes unless they exist. Run it on the server's machine, with the server's
PySpark.
"""

from __future__ import annotations

import sys
from pathlib import Path

from persisting.errors import StorageError
from persisting.spark import pruning, settings
from persisting.spark.java import cache_folder


def main() -> None:
    """Compile the classes unless they exist; print the arguments."""
    from pyspark import SparkConf, SparkContext

    try:
        cache_folder("spark")
    except OSError as exc:
        raise StorageError(
            f"there is no folder in which the classes can be kept ({exc}); set XDG_CACHE_HOME to "
            "one that you own"
        ) from exc
    variables = {**settings.variables("local", {}), **settings.java_variables()}
    conf = SparkConf(loadDefaults=False)
    for name, value in settings.defaults("local", Path(), {}).items():
        if name == "spark.driver.defaultJavaOptions":  # no output but the arguments
            conf.set(name, value)
    with settings.environment(variables):
        SparkContext._ensure_initialized(conf=conf)
    extension = f"{pruning.EXTENSIONS}={pruning.EXTENSION}"
    sys.stdout.write(f"--driver-class-path {pruning.compiled_classes()} --conf {extension}\n")


if __name__ == "__main__":
    main()
