"""Topics at ``az://``: on Azurite, with the credentials that Azure has."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from support.azurite import ACCOUNT, KEY, Azurite, environment_of, shared_access_token
from support.object_stores import SeaweedFS

from persisting.errors import InvalidArgument, StorageError
from persisting.queue import read_queue, write_queue
from persisting.store.object_store import open_store
from persisting.store.probe import probe
from persisting.store.storage_options import StorageOptions
from persisting.store_address import parse
from persisting.topic import backup
from persisting.topic.store_files import StoreTopic

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

LEASE = 1.5


def where(server: Azurite | SeaweedFS, prefix: str, **options: str) -> dict[str, Any]:
    """Return the place of the topic, and the options that reach it."""
    return {
        "topic": "t",
        "storage_path": server.url(prefix),
        "storage_options": {**server.options(), **options},
    }


async def stored(place: dict[str, Any]) -> list[int]:
    async with await read_queue(**place) as reader:
        return sorted(record["id"] for record in await reader.get(None))


def child(program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a process whose credentials are in its environment."""
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


_READ = """
import asyncio, json, sys
from persisting.queue import read_queue

async def main(path):
    async with await read_queue(topic="t", storage_path=path) as reader:
        print(json.dumps(sorted(record["id"] for record in await reader.get(None))), flush=True)

asyncio.run(main(sys.argv[1]))
"""

_WRITE = """
import asyncio, sys
from persisting.queue import write_queue

async def main(path, lease):
    writer = await write_queue(
        topic="t", storage_path=path, durable=True, num_buckets=2,
        backend_options={"lease": float(lease), "flush_interval": 0.2},
    )
    for number in range(100_000):
        await writer.put({"id": number})
        print(number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_reads_what_is_acknowledged_and_what_is_flushed(
    azurite: Azurite, prefix: str
) -> None:
    place = where(azurite, prefix)
    async with await write_queue(
        **place, durable=True, num_buckets=2, backend_options={"flush_interval": None}
    ) as writer:
        await writer.put([{"id": number} for number in range(20)])
        await writer.flush()
        await writer.put([{"id": number} for number in range(20, 25)])  # in the log only
        variables = environment_of(azurite.options())
        with child(_READ, place["storage_path"], **variables) as reading:
            printed, _ = await asyncio.to_thread(reading.communicate)
    assert json.loads(printed) == list(range(25))


async def test_records_of_a_killed_process_are_there_once(azurite: Azurite, prefix: str) -> None:
    place = where(azurite, prefix)
    variables = environment_of(azurite.options())
    with child(_WRITE, place["storage_path"], str(LEASE), **variables) as writing:
        assert writing.stdout is not None
        seen = [writing.stdout.readline() for _ in range(60)]
        writing.send_signal(signal.SIGKILL)
        seen += writing.stdout.readlines()
    acknowledged = [int(line) for line in seen if line.endswith("\n")]
    async with await write_queue(**place) as writer:
        await writer.put({"id": -1})
    found = await stored(place)
    assert found[:-1] == [-1, *acknowledged][: len(found) - 1]
    assert len(found) - 1 - len(acknowledged) in (0, 1)  # the last put may be unanswered


async def test_token_that_reads_is_enough_for_a_reader(azurite: Azurite, prefix: str) -> None:
    """Azurite deletes nothing with a token: its batches do not know them."""
    place = where(azurite, prefix)
    async with await write_queue(
        **place, durable=True, num_buckets=2, backend_options={"flush_interval": None}
    ) as writer:
        await writer.put([{"id": number} for number in range(10)])
        await writer.flush()
        await writer.tag("ten")
        await writer.put({"id": 10})  # in the log only
        options = azurite.options_with_token(shared_access_token("rl"))
        environment = environment_of(options)
        with child(_READ, place["storage_path"], **environment) as reading:
            printed, _ = await asyncio.to_thread(reading.communicate)
    assert json.loads(printed) == list(range(11))


@pytest.mark.parametrize("credentials", ["key", "token"])
async def test_credentials_are_in_no_error_log_repr_or_object(
    azurite: Azurite, prefix: str, credentials: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    refused = azurite.options(azure_storage_account_key="bm90IHRoZSBrZXkgb2YgdGhpcyBhY2NvdW50")
    secrets = [refused["azure_storage_account_key"], KEY]
    if credentials == "token":
        token = shared_access_token("r")  # reads only
        refused = azurite.options_with_token(token)
        secrets = [token, token.rpartition("sig=")[2], KEY]
    place = where(azurite, prefix)
    shown = []
    async with await write_queue(**place, durable=True, num_buckets=1) as writer:
        await writer.put({"id": 1})
        shown.append(repr(writer))
    with pytest.raises(StorageError) as caught:
        await write_queue(**{**place, "storage_options": refused}, durable=True)
    shown += traceback.format_exception(caught.value)
    store = open_store(parse(place["storage_path"]), StorageOptions(refused))
    shown += [repr(store), repr(store.options), caplog.text]
    assert "az://" in "".join(shown)
    for secret in secrets:
        assert secret not in "".join(shown)
    sound = open_store(parse(place["storage_path"]), StorageOptions(azurite.options()))
    for key in sound.list(""):
        found = sound.get(key)
        assert found is None or not any(secret.encode() in found.data for secret in secrets)


async def test_missing_container_is_named(azurite: Azurite) -> None:
    place = {**where(azurite, "p"), "storage_path": "az://missing/p"}
    with pytest.raises(StorageError, match="there is no container 'missing'"):
        await write_queue(**place, durable=True)


def test_commands_take_credentials_from_the_environment(
    azurite: Azurite, prefix: str, tmp_path: Path
) -> None:
    lines = tmp_path / "records.jsonl"
    lines.write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))

    def run(*words: str) -> str:
        program = "import sys; from persisting.cli.app import run; sys.exit(run(sys.argv[1:]))"
        given = [*words, "-s", azurite.url(prefix)]
        with child(program, *given, **environment_of(azurite.options())) as process:
            printed, _ = process.communicate()
        assert process.returncode == 0, printed
        assert KEY not in printed
        return printed

    run("create", "t", "--durable", "--buckets", "2")
    run("import", "t", str(lines))
    assert json.loads(run("count", "t", "--json"))["count"] == 10
    run("verify", "t")
    run("delete", "t", "--yes")
    assert "t" not in run("topics").split()


_SPARK = """
import sys, pyarrow as pa
from support.spark.writes import DirectStore
from persisting.store_address import parse

store = DirectStore(parse(sys.argv[1]))
store.save(pa.table({"id": range(10)}), parts=2, numBuckets=2)
for _ in range(2):
    store.save(pa.table({"id": range(10, 15)}), writeId="w")
"""


async def test_spark_writes_with_credentials_from_the_environment(
    azurite: Azurite, prefix: str
) -> None:
    """With the calls that Spark makes."""
    variables = environment_of(azurite.options())
    with child(_SPARK, azurite.url(prefix), **variables) as writing:
        assert await asyncio.to_thread(writing.wait) == 0
    assert await stored(where(azurite, prefix)) == list(range(15))


async def test_topic_moves_between_s3_and_azure(
    azurite: Azurite, server: SeaweedFS, prefix: str
) -> None:
    """Also within Azure, where the store copies the objects itself."""
    source = where(server, prefix)
    async with await write_queue(**source, durable=True, num_buckets=2) as writer:
        await writer.put([{"id": number} for number in range(30)])
        await writer.tag("thirty")
    options = StorageOptions(azurite.options())
    copy = open_store(parse(azurite.url(prefix)) / "copy", options)
    given = StoreTopic.find("t", source["storage_path"], source["storage_options"])
    await asyncio.to_thread(backup.create, given, copy)
    assert await asyncio.to_thread(backup.damage_in, copy) == []
    target = open_store(parse(azurite.url(prefix)) / "t", options)
    await asyncio.to_thread(backup.restore, copy, target)
    moved = where(azurite, prefix)
    assert await stored(moved) == list(range(30))
    async with await write_queue(**moved) as writer:
        await writer.put({"id": 30})
        await writer.restore("thirty")
    assert await stored(moved) == list(range(30))


def test_plain_http_needs_allow_http(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    options = azurite.options()
    del options["allow_http"]
    with pytest.raises(InvalidArgument, match="unencrypted"):
        StorageOptions(options)
    for name, value in environment_of(options).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="AZURE_ALLOW_HTTP=true in the environment"):
        open_store(parse(azurite.url("p")), StorageOptions())
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    probe(open_store(parse(azurite.url("p")), StorageOptions()))
    assert ACCOUNT not in repr(StorageOptions())
