"""Run the pipeline of this folder: it divides raw rows into curated and rejected ones.

    pip install 'pyspark[pipelines]'
    python examples/spark_pipeline/run.py [folder]

The default folder is ./queue_storage. Every run puts 50 more rows into the topic ``raw`` and starts
``spark-pipelines`` on a copy of the project, which takes only new rows, each once.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from persisting.queue import read_queue, write_queue
from persisting.spark import settings

HERE = Path(__file__).parent
MASTER = "local[2]"


def row(number: int) -> dict[str, object]:
    """Return a row; of five rows one has no text, and one too little."""
    texts = (None, "hi", f"a text  that is\nlong enough, no. {number}")
    return {"id": number, "text": texts[min(number % 5, 2)]}


async def produce(folder: Path, count: int) -> None:
    writer = await write_queue(
        topic="raw", storage_path=str(folder), num_buckets=2, backend="persisting"
    )
    async with writer:
        first = (await writer.stats())["total_count"]
        await writer.put([row(number) for number in range(first, first + count)])


async def count(folder: Path, topic: str) -> int:
    async with await read_queue(topic=topic, storage_path=str(folder)) as reader:
        rows: int = (await reader.stats())["total_count"]
    return rows


def project(folder: Path) -> Path:
    """Copy the project, with its state in ``folder``; return the path of its spec."""
    copy = folder.absolute() / "pipeline"
    shutil.copytree(HERE / "transformations", copy / "transformations", dirs_exist_ok=True)
    text = (HERE / "spark-pipeline.yml").read_text()
    state = f"storage: {(folder / 'pipeline_state').absolute().as_uri()}"
    spec = copy / "spark-pipeline.yml"
    spec.write_text(re.sub(r"(?m)^storage: .*$", state, text))
    return spec


def run(spec: Path, folder: Path) -> None:
    """Run a pipeline with the Java and the Python that persisting.spark.session would use."""
    path = [str(Path(settings.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **settings.variables(MASTER, {}),
        **settings.java_variables(),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "QUEUE_STORAGE": str(folder.absolute()),
    }
    program = Path(sys.executable).with_name("spark-pipelines")
    quiet = [f"--conf=spark.ui.{name}=false" for name in ("enabled", "showConsoleProgress")]
    command = [str(program), "--remote", MASTER, *quiet, "run", "--spec", str(spec)]
    subprocess.run(command, cwd=spec.parent, env=environment, check=True)


def main(folder: Path) -> None:
    asyncio.run(produce(folder, 50))
    run(project(folder), folder)
    for topic in ("raw", "curated", "rejected"):
        print(f"{topic}: {asyncio.run(count(folder, topic))} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "queue_storage"))
