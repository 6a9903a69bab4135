"""``pipeline``: the Spark jobs."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from persisting.cli import output, parameters, topics_access
from persisting.cli.json_contract import prints
from persisting.cli.parameters import Names, Setting
from persisting.errors import InvalidArgument
from persisting.topic import spec as topics


class JobResult(msgspec.Struct):
    """What a job did; which of the numbers there are depends on the job."""

    job: str
    topic: str
    seconds: float
    rows: int | None = None
    """Rows that were read, rewritten or indexed."""
    written: int | None = None
    target: str | None = None
    fragments_before: int | None = None
    fragments_after: int | None = None
    files: int | None = None
    bytes: int | None = None
    batches: int | None = None
    lag: dict[str, int] | None = None
    parts: dict[str, int] | None = None
    """Of a split, the rows of each part."""


class NearPair(msgspec.Struct):
    """Two records whose texts are alike."""

    first: dict[str, Any]
    second: dict[str, Any]
    similarity: float


class ProfileRow(msgspec.Struct):
    """A field in a bucket, or in all (bucket is null)."""

    bucket: int | None
    column: str
    type: str
    facts: dict[str, Any]
    """Rows, nulls, ranges, lengths: as the job 'profile' has them."""


_file_format = click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "lance", "jsonl"]),
    help="Default: by the names of the files.",
)
_threshold = click.option(
    "--threshold",
    default=0.8,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Least similarity of texts.",
)
_write_id = click.option(
    "--write-id", metavar="NAME", help="A repetition under it doubles nothing."
)


def _mode(when: str) -> Any:
    return click.option(
        "--mode",
        type=click.Choice(["error", "overwrite", "append"]),
        default="error",
        show_default=True,
        help=when,
    )


def _spark_options(command: Any) -> Any:
    for option in (
        parameters.as_json,
        parameters.storage,
        click.option(
            "--conf", type=Setting(), multiple=True, help="A setting of Spark; again for more."
        ),
        click.option("--master", default="local[*]", show_default=True, help="Spark's master."),
    ):
        command = option(command)
    return command


@contextmanager
def _session(master: str, conf: tuple[tuple[str, Any], ...]) -> Iterator[Any]:
    """Spark for the length of a job; its errors in a line, without Java's traces."""
    from persisting.spark import session
    from persisting.spark.interrupts import preserved_interrupt_handler
    from persisting.spark.query_errors import as_storage_errors, silence_logs

    with preserved_interrupt_handler():
        # The fields of a topic may differ in case only.
        spark = session(
            "persisting", master=master, conf={"spark.sql.caseSensitive": "true", **dict(conf)}
        )
    if not topics_access.debugging():
        silence_logs(spark)
    try:
        with as_storage_errors():
            yield spark
    finally:
        spark.stop()


@click.group()
def pipeline() -> None:
    """Work on whole topics with Spark, here or on a cluster.

    Java comes with persisting[spark] where the machine has none. What writes to a topic needs that
    nobody has it open for writing.

    \b
    Examples:
      persisting pipeline profile events
      persisting pipeline run events curated --where "score > 0" --select "id, lower(text) AS text"
      persisting pipeline split curated --key id --tag v1 --output training
    """


@pipeline.command()
@parameters.topic
@_spark_options
@prints("pipeline compact", "persisting.cli.commands.pipeline:JobResult")
def compact(topic: str, master: str, conf: Any, storage: str, as_json: bool) -> None:
    """Rewrite small fragments as larger ones, spread over the cluster.

    \b
    Example:
      persisting pipeline compact events --master spark://host:7077
    """
    source = topics_access.stored(topic, storage)
    with _session(master, conf) as spark:
        from persisting.spark import jobs

        done = jobs.compact(spark, source.folder)
    _tell(
        JobResult(
            "compact",
            source.config.topic,
            done["seconds"],
            rows=done["rows"],
            fragments_before=done["fragments_before"],
            fragments_after=done["fragments_after"],
        ),
        as_json,
    )


@pipeline.command()
@parameters.topic
@click.option("--column", "-f", required=True, help="Field to index.")
@click.option("--kind", help="vector, text or scalar; default: by the field's type.")
@click.option(
    "--metric",
    type=click.Choice(["l2", "cosine", "dot"]),
    default="l2",
    show_default=True,
    help="Distance of vectors.",
)
@_spark_options
@prints("pipeline index", "persisting.cli.commands.pipeline:JobResult")
def index(
    topic: str,
    column: str,
    kind: str | None,
    metric: str,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Build an index of a field, a bucket per task.

    \b
    Example:
      persisting pipeline index rollouts --column embedding --metric cosine
    """
    source, started = topics_access.stored(topic, storage), time.monotonic()
    with _session(master, conf) as spark:
        from persisting.spark import jobs

        done = jobs.build_index(spark, source.folder, column=column, kind=kind, metric=metric)
    seconds = time.monotonic() - started
    _tell(JobResult("index", source.config.topic, seconds, rows=done["rows"]), as_json)


@pipeline.command()
@parameters.topic
@click.argument("target")
@click.option("--key", "-k", type=Names(), help="Fields that make a record the same.")
@click.option("--near", metavar="FIELD", help="Drop records whose text is alike in this field.")
@_threshold
@click.option(
    "--keep",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Which of the same stays.",
)
@_mode("If the target has records.")
@_write_id
@_spark_options
@prints("pipeline dedupe", "persisting.cli.commands.pipeline:JobResult")
def dedupe(
    topic: str,
    target: str,
    key: list[str] | None,
    near: str | None,
    threshold: float,
    keep: str,
    mode: str,
    write_id: str | None,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Write the records of a topic to another one, each once.

    A target that has records is an error, but for a repetition under a --write-id: say with --mode
    whether to replace them or to add to them.

    \b
    Examples:
      persisting pipeline dedupe events events-once --key id --keep last
      persisting pipeline dedupe texts texts-once --near text --threshold 0.85
    """
    if key is None and near is None:
        raise click.UsageError("Say what makes records the same: --key or --near.")
    source, folder, started = (
        topics_access.stored(topic, storage),
        topics_access.folder_of(target, storage),
        time.monotonic(),
    )
    _must_differ(source, folder)
    with _session(master, conf) as spark:
        from persisting.spark import jobs, read_topic

        if mode == "error" and write_id is None:
            _must_be_empty(spark, folder)
        rows = read_topic(spark, source.folder, includeMetadata=True)
        if key is not None:
            rows = jobs.deduplicate(rows, key, keep=keep)
        if near is not None:
            rows = jobs.drop_near_duplicates(rows, near, threshold, keep=keep)
        plain = rows.drop("_bucket", "_offset", "_time")
        written = _save(plain, folder, "overwrite" if mode == "overwrite" else "append", write_id)
    seconds = time.monotonic() - started
    result = JobResult("dedupe", source.config.topic, seconds, written=written, target=str(folder))
    _tell(result, as_json)


def _save(rows: Any, folder: Path, mode: str, write_id: str | None) -> int:
    from persisting.spark.jobs.row_count import counted

    options = {} if write_id is None else {"writeId": write_id}
    with counted(rows) as (observed, count):
        observed.write.format("persisting").mode(mode).options(**options).save(str(folder))
    return count()


def _must_be_empty(spark: Any, target: Path) -> None:
    from persisting.spark import read_topic

    if (target / topics.FILE).exists() and not read_topic(spark, target).isEmpty():
        raise InvalidArgument(
            f"the topic {target.name!r} has records; say --mode overwrite or append, or name the "
            "write with --write-id, so that it can be repeated"
        )


def _must_differ(source: Any, target: Path) -> None:
    if source.folder.resolve() == target.resolve():
        raise click.UsageError("Source and target are the same topic.")


@pipeline.command("near-duplicates")
@parameters.topic
@click.option("--column", "-f", required=True, help="Field of the texts.")
@_threshold
@click.option(
    "--limit", "-n", default=100, show_default=True, type=click.IntRange(0), help="How many."
)
@_spark_options
@prints("pipeline near-duplicates", "persisting.cli.commands.pipeline:NearPair", lines=True)
def near_duplicates(
    topic: str,
    column: str,
    threshold: float,
    limit: int,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Show pairs of records whose texts are alike, the most similar first.

    \b
    Example:
      persisting pipeline near-duplicates texts --column text --threshold 0.9
    """
    source = topics_access.stored(topic, storage)
    topics_access.columns(source, [column])
    with _session(master, conf) as spark:
        from persisting.spark import jobs, read_topic

        rows = read_topic(spark, source.folder, columns=[column], includeMetadata=True)
        pairs = jobs.near_duplicates(rows, column, threshold)
        found = pairs.orderBy("similarity", ascending=False).limit(limit).collect()
    pairs_found = [
        NearPair(_in_utc(one["first"]), _in_utc(one["second"]), one["similarity"]) for one in found
    ]
    for pair in pairs_found:
        if as_json:
            output.json_line(pair)
        else:
            first, second = (f"{p['_bucket']}:{p['_offset']}" for p in (pair.first, pair.second))
            output.line(f"{first:>8}  {second:>8}  {pair.similarity:.3f}")


def _in_utc(row: Any) -> dict[str, Any]:
    """A row with its moments in UTC; Spark gives them in the time of this machine."""
    return {
        name: value.astimezone(dt.timezone.utc) if isinstance(value, dt.datetime) else value
        for name, value in row.asDict().items()
    }


@pipeline.command()
@parameters.topic
@click.argument("path", type=click.Path())
@_file_format
@click.option("--partition-by", type=Names(), help="A folder for each value of these fields.")
@_mode("If something is there.")
@click.option("--tag", metavar="NAME", help="As the topic was at a tag.")
@parameters.where
@parameters.columns
@_spark_options
@prints("pipeline export", "persisting.cli.commands.pipeline:JobResult")
def export(
    topic: str,
    path: str,
    kind: str | None,
    partition_by: list[str] | None,
    mode: str,
    tag: str | None,
    where: str | None,
    columns: list[str] | None,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Write a topic to a folder of files: Parquet, Lance or JSON lines.

    \b
    Examples:
      persisting pipeline export events training --partition-by label
      persisting pipeline export events v1.lance --tag v1 --columns id,text
    """
    source, started = topics_access.stored(topic, storage), time.monotonic()
    topics_access.columns(source, columns)
    with _session(master, conf) as spark:
        from persisting.spark import jobs, read_topic

        options = {} if tag is None else {"tag": tag}
        rows = read_topic(spark, source.folder, columns=columns, where=where, **options)
        done = jobs.export(rows, path, format=kind, partition_by=partition_by or (), mode=mode)
    seconds = time.monotonic() - started
    result = JobResult(
        "export",
        source.config.topic,
        seconds,
        rows=done["rows"],
        target=done["path"],
        files=done["files"],
        bytes=done["bytes"],
    )
    _tell(result, as_json)


@pipeline.command()
@parameters.topic
@click.argument("source", type=click.Path())
@_file_format
@click.option("--schema", metavar="DDL", help='Types of JSON lines: "id STRING, score DOUBLE".')
@click.option("--bucket-column", metavar="FIELD", help="Of a new topic.  [default: id]")
@click.option("--buckets", type=click.IntRange(1), help="Of a new topic.  [default: 4]")
@_write_id
@_spark_options
@prints("pipeline ingest", "persisting.cli.commands.pipeline:JobResult")
def ingest(
    topic: str,
    source: str,
    kind: str | None,
    schema: str | None,
    bucket_column: str | None,
    buckets: int | None,
    write_id: str | None,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Put files, a folder or a pattern of them into a topic.

    \b
    Examples:
      persisting pipeline ingest events "exports/*.parquet" --write-id load-1
      persisting pipeline ingest events old.lance
    """
    folder, started = topics_access.folder_of(topic, storage), time.monotonic()
    with _session(master, conf) as spark:
        from persisting.spark import jobs

        done = jobs.ingest(
            spark,
            source,
            folder,
            format=kind,
            schema=schema,
            bucket_column=bucket_column,
            num_buckets=buckets,
            write_id=write_id,
        )
    seconds = time.monotonic() - started
    _tell(JobResult("ingest", folder.name, seconds, rows=done["rows"], target=str(folder)), as_json)


@pipeline.command()
@parameters.topic
@parameters.columns
@_spark_options
@prints("pipeline profile", "persisting.cli.commands.pipeline:ProfileRow", many=True)
def profile(
    topic: str,
    columns: list[str] | None,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Tell rows, nulls, ranges and text lengths of each field.

    \b
    Example:
      persisting pipeline profile events --columns score,text
    """
    source = topics_access.stored(topic, storage)
    topics_access.columns(source, columns)
    with _session(master, conf) as spark:
        from persisting.spark import jobs, read_topic

        rows = read_topic(spark, source.folder, columns=columns, includeMetadata=True)
        plain = rows.drop("_offset", "_time")
        collected = [row.asDict(recursive=True) for row in jobs.profile(plain).collect()]
    found = [
        ProfileRow(one.pop("bucket"), one.pop("column"), one.pop("type"), one) for one in collected
    ]
    output.show(found, as_json, lambda: _tell_profile(found))


def _tell_profile(found: list[ProfileRow]) -> None:
    names = list(found[0].facts) if found else []
    output.table(
        ["#bucket", "field", "type", *(f"#{name}" for name in names)],
        [
            ["all" if one.bucket is None else one.bucket, one.column, one.type]
            + [one.facts[name] for name in names]
            for one in found
        ],
    )


@pipeline.command()
@parameters.topic
@click.option("--key", "-k", type=Names(), required=True, help="Fields that decide the part.")
@click.option("--tag", required=True, metavar="NAME", help="Made now, if there is none.")
@click.option(
    "--share",
    type=Setting(),
    multiple=True,
    help="As in train=0.9; again for each part.  [default: train=0.8, validation=0.1, test=0.1]",
)
@click.option("--salt", default="", help="Another one makes another split.")
@click.option(
    "--output", "-o", "output_folder", metavar="DIR", help="Write each part to DIR/<part> as files."
)
@_mode("If something is in DIR/<part>.")
@_file_format
@parameters.where
@parameters.columns
@_spark_options
@prints("pipeline split", "persisting.cli.commands.pipeline:JobResult")
def split(
    topic: str,
    key: list[str],
    tag: str,
    share: tuple[tuple[str, Any], ...],
    salt: str,
    output_folder: str | None,
    mode: str,
    kind: str | None,
    where: str | None,
    columns: list[str] | None,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Split a topic into parts by a hash of keys, pinned by a tag: the same for ever.

    \b
    Examples:
      persisting pipeline split curated --key id --tag v1
      persisting pipeline split curated --key id --tag v1 --share train=0.8 --share test=0.2
    """
    source, started = topics_access.stored(topic, storage), time.monotonic()
    topics_access.columns(source, [*(columns or []), *key])
    with _session(master, conf) as spark:
        from persisting.spark import jobs
        from persisting.spark.jobs.export_targets import part_targets
        from persisting.spark.jobs.split_job import SHARES

        shares = dict(share) or SHARES
        places = {} if output_folder is None else part_targets(output_folder, shares, kind, mode)
        parts = jobs.split_topic(
            spark,
            source.folder,
            key=key,
            tag=tag,
            shares=shares,
            salt=salt,
            columns=columns,
            where=where,
        )
        counts = {
            name: jobs.export(part, places[name], format=kind, mode=mode)["rows"]
            if name in places
            else part.count()
            for name, part in parts.items()
        }
    seconds = time.monotonic() - started
    _tell(
        JobResult("split", source.config.topic, seconds, target=output_folder, parts=counts),
        as_json,
    )


@pipeline.command("run")
@parameters.topic
@click.argument("target")
@parameters.where
@click.option("--select", metavar="SQL", help='Fields of the target: "id, lower(text) AS text".')
@click.option("--name", help="Of the progress that is kept.  [default: the source's name]")
@click.option("--max-rows", type=click.IntRange(1), help="Rows per batch.")
@click.option("--bucket-column", metavar="FIELD", help="Of a new target.  [default: id]")
@click.option("--buckets", type=click.IntRange(1), help="Of a new target.  [default: 4]")
@_spark_options
@prints("pipeline run", "persisting.cli.commands.pipeline:JobResult")
def run(
    topic: str,
    target: str,
    where: str | None,
    select: str | None,
    name: str | None,
    max_rows: int | None,
    bucket_column: str | None,
    buckets: int | None,
    master: str,
    conf: Any,
    storage: str,
    as_json: bool,
) -> None:
    """Bring what is new in a topic into another one, each record exactly once.

    Each run takes what came since the one before; killed at any point, the next goes on. --where is
    pushed down to the storage, --select is Spark's SQL.

    \b
    Example:
      persisting pipeline run events curated --where "score > 0" --select "id, score * 2 AS score"
    """
    source, folder = topics_access.stored(topic, storage), topics_access.folder_of(target, storage)
    _must_differ(source, folder)

    def transform(rows: Any) -> Any:
        return rows if select is None else rows.selectExpr(*_expressions(select))

    with _session(master, conf) as spark:
        from persisting.spark import jobs

        done = jobs.incremental(
            spark,
            source.folder,
            folder,
            transform,
            name=name,
            read={} if where is None else {"filter": where},
            max_rows_per_batch=max_rows,
            bucket_column=bucket_column,
            num_buckets=buckets,
            quiet=True if as_json else None,
        )
    result = JobResult(
        "run",
        source.config.topic,
        done.seconds,
        rows=done.rows,
        written=done.written,
        target=str(folder),
        batches=done.batches,
        lag=done.lag,
    )
    _tell(result, as_json)


def _expressions(select: str) -> list[str]:
    """The parts of a list of expressions: commas within brackets or quotes divide nothing."""
    found, depth, quote, start, escaped = [], 0, "", 0, False
    for at, char in enumerate(select):
        if escaped or (char == "\\" and quote in ("'", '"')):
            escaped = not escaped
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            found.append(select[start:at])
            start = at + 1
    return [part.strip() for part in [*found, select[start:]] if part.strip()]


def _tell(result: JobResult, as_json: bool) -> None:
    def tell() -> None:
        every = msgspec.to_builtins(result).items()
        known = {name: value for name, value in every if value is not None and value != {}}
        known["seconds"] = output.seconds(result.seconds)
        for name in ("bytes",):
            if name in known:
                known[name] = output.size(known[name])
        for name in ("parts", "lag"):
            if name in known:
                known[name] = ", ".join(f"{part} {count:,}" for part, count in known[name].items())
        output.facts(
            (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
            for name, value in known.items()
        )

    output.show(result, as_json, tell)
