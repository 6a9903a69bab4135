"""Options of the format are parsed whatever the case of their names; errors name the option and say
what it takes."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from persisting.errors import InvalidArgument
from persisting.spark.source_options import (
    EARLIEST,
    LATEST,
    READ,
    WRITE,
    read_options,
    write_options,
)

UTC = dt.timezone.utc


def read(**given: str) -> Any:
    return read_options({"path": "/data/t", **given})


def write(**given: str) -> Any:
    return write_options({"path": "/data/t", **given})


class TestDefaults:
    def test_read_is_from_earliest_to_latest_by_default(self) -> None:
        found = read()
        assert (found.starting, found.ending) == (EARLIEST, LATEST)
        assert (found.columns, found.where, found.version) == (None, None, None)
        assert found.rows_per_partition is None
        assert found.max_per_trigger is None
        assert found.fail_on_loss is True
        assert found.metadata is False

    def test_write_uses_the_options_of_the_topic_by_default(self) -> None:
        found = write()
        assert found.num_buckets is None
        assert found.bucket_column is None
        assert found.compression is None
        assert found.vectors is None
        assert found.write_id is None


class TestFolder:
    @pytest.mark.parametrize(
        ("given", "folder"),
        [
            ({"path": "/data/t"}, "/data/t"),
            ({"path": "/data/t/"}, "/data/t"),
            ({"path": "/data", "topic": "t"}, "/data/t"),
            ({"path": "file:///data/t"}, "/data/t"),
            ({"path": "file:/data/t"}, "/data/t"),
            ({"path": "/da ta/ü"}, "/da ta/ü"),
        ],
    )
    def test_folder_is_the_path_with_or_without_the_topic(self, given: Any, folder: str) -> None:
        assert read_options(given).folder == write_options(given).place == Path(folder)

    @pytest.mark.parametrize("topic", ["../t", "a/b", "/etc/t", ".."])
    @pytest.mark.parametrize("parse", [read, write])
    def test_topic_name_cannot_leave_the_folder(self, parse: Any, topic: str) -> None:
        with pytest.raises(InvalidArgument, match="topic"):
            parse(topic=topic)

    def test_folder_in_parsed_options_is_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert read_options({"path": "queues/t"}).folder == tmp_path / "queues" / "t"

    @pytest.mark.parametrize("parse", [read_options, write_options])
    def test_missing_path_is_refused_with_the_options_to_set(self, parse: Any) -> None:
        for given in ({}, {"topic": "t"}):
            with pytest.raises(InvalidArgument, match=r"<storage_path>/<topic>.*path and topic"):
                parse(given)

    @pytest.mark.parametrize("parse", [read_options, write_options])
    @pytest.mark.parametrize("path", ["hdfs://host/t", "abfss://c@a/t"])
    def test_path_of_another_storage_is_refused(self, parse: Any, path: str) -> None:
        with pytest.raises(InvalidArgument, match=path.split(":")[0]):
            parse({"path": path})


class TestNames:
    @pytest.mark.parametrize("spelled", ["startingoffsets", "STARTINGOFFSETS", "startingOffsets"])
    def test_option_names_ignore_case(self, spelled: str) -> None:
        assert read(**{spelled: "latest"}).starting == LATEST

    @pytest.mark.parametrize(
        ("wrong", "near"), [("colums", "columns"), ("startOffsets", "startingOffsets")]
    )
    def test_unknown_option_is_refused_with_the_nearest_name(self, wrong: str, near: str) -> None:
        with pytest.raises(InvalidArgument, match=f"'{wrong}'.*did you mean {near}"):
            read(**{wrong: "x"})

    @pytest.mark.parametrize("known", [READ, WRITE])
    def test_unknown_option_is_refused_with_all_names(self, known: tuple[str, ...]) -> None:
        parse = read if known is READ else write
        with pytest.raises(InvalidArgument) as raised:
            parse(zzz="1")
        assert all(name in str(raised.value) for name in known)

    def test_reads_and_writes_refuse_each_others_options(self) -> None:
        for name in set(WRITE) - set(READ):
            with pytest.raises(InvalidArgument, match=name):
                read(**{name: "1"})
        for name in set(READ) - set(WRITE):
            with pytest.raises(InvalidArgument, match=name):
                write(**{name: "1"})

    @pytest.mark.parametrize("name", [*READ, *WRITE])
    def test_empty_option_is_refused(self, name: str) -> None:
        parse = read if name in READ else write
        with pytest.raises(InvalidArgument, match=name):
            parse(**{name: ""})

    @pytest.mark.parametrize("name", ["checkpointLocation", "queryName"])
    def test_options_of_spark_itself_are_ignored(self, name: str) -> None:
        read(**{name: "x"})
        write(**{name: "x"})


class TestColumns:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("a", ("a",)),
            ("a,b", ("a", "b")),
            (" b , a ", ("b", "a")),
            ("a b,ü", ("a b", "ü")),
            ('["a,b", " x "]', ("a,b", " x ")),
        ],
    )
    def test_columns_are_parsed_in_order(self, text: str, names: tuple[str, ...]) -> None:
        assert read(columns=text).columns == names

    @pytest.mark.parametrize("text", [" ", ",", "[]"])
    def test_columns_must_name_a_field(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="columns"):
            read(columns=text)

    def test_columns_must_not_repeat_a_field(self) -> None:
        with pytest.raises(InvalidArgument, match=r"columns.*'a'.*twice"):
            read(columns="a,b,a")


class TestPositions:
    @pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("earliest", EARLIEST),
            ("LATEST", LATEST),
            ('{"0": 5}', {0: 5}),
            ('{"0": 5, "11": 0}', {0: 5, 11: 0}),
            ("{}", {}),
        ],
    )
    def test_positions_are_words_or_offsets_by_bucket(
        self, option: str, text: str, found: Any
    ) -> None:
        parsed = read(**{option: text})
        assert (parsed.starting if option == "startingOffsets" else parsed.ending) == found

    @pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
    @pytest.mark.parametrize(
        "text", ["first", "5", "[5]", '{"a": 5}', '{"0": "x"}', '{"0": 1.5}', '{"0": -1}', "{"]
    )
    def test_invalid_positions_are_refused(self, option: str, text: str) -> None:
        with pytest.raises(InvalidArgument, match=option):
            read(**{option: text})

    @pytest.mark.parametrize("option", ["startingTimestamp", "endingTimestamp", "timestamp"])
    @pytest.mark.parametrize(
        ("text", "moment"),
        [
            ("2026-01-31T12:00:00Z", dt.datetime(2026, 1, 31, 12, tzinfo=UTC)),
            ("2026-01-31T12:00:00+02:00", dt.datetime(2026, 1, 31, 10, tzinfo=UTC)),
            ("2026-01-31 12:00:00.000001+00:00", dt.datetime(2026, 1, 31, 12, 0, 0, 1, UTC)),
            ("1769860800000", dt.datetime(2026, 1, 31, 12, tzinfo=UTC)),
            ("0", dt.datetime(1970, 1, 1, tzinfo=UTC)),
        ],
    )
    def test_timestamps_are_parsed(self, option: str, text: str, moment: dt.datetime) -> None:
        parsed = read(**{option: text})
        found = {
            "startingTimestamp": parsed.starting,
            "endingTimestamp": parsed.ending,
            "timestamp": parsed.version,
        }
        assert found[option] == moment

    def test_timestamps_without_a_zone_are_local(self) -> None:
        here = dt.datetime(2026, 1, 31, 12).astimezone()
        assert read(timestamp="2026-01-31T12:00:00").version == here

    @pytest.mark.parametrize("option", ["startingTimestamp", "endingTimestamp", "timestamp"])
    @pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "9" * 30, "1.5"])
    def test_invalid_timestamps_are_refused(self, option: str, text: str) -> None:
        with pytest.raises(InvalidArgument, match=f"{option}=.*ISO 8601"):
            read(**{option: text})

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"startingOffsets": "latest"}, {"startingTimestamp": "0"}),
            ({"endingOffsets": "latest"}, {"endingTimestamp": "0"}),
            ({"version": "1"}, {"tag": "x"}),
            ({"timestamp": "0"}, {"tag": "x"}),
            ({"version": "1"}, {"timestamp": "0"}),
        ],
    )
    def test_conflicting_options_are_refused(
        self, one: dict[str, str], other: dict[str, str]
    ) -> None:
        with pytest.raises(InvalidArgument, match=f"{next(iter(one))}.*{next(iter(other))}"):
            read(**one, **other)


class TestVersions:
    def test_version_is_a_number_or_a_tag(self) -> None:
        assert read(version="12").version == 12
        assert read(tag="gold").version == "gold"
        assert read(tag="12").version == "12"

    @pytest.mark.parametrize("text", ["x", "-1", "1.0", "²"])
    def test_invalid_version_numbers_are_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match=r"version=.*number"):
            read(version=text)


class TestFlagsAndCounts:
    @pytest.mark.parametrize("option", ["includeMetadata", "failOnDataLoss"])
    @pytest.mark.parametrize(("text", "flag"), [("true", True), ("False", False), ("TRUE", True)])
    def test_flag_options_are_true_or_false(self, option: str, text: str, flag: bool) -> None:
        parsed = read(**{option: text})
        assert (parsed.metadata if option == "includeMetadata" else parsed.fail_on_loss) is flag

    @pytest.mark.parametrize("option", ["includeMetadata", "failOnDataLoss"])
    @pytest.mark.parametrize("text", ["yes", "1"])
    def test_invalid_flags_are_refused(self, option: str, text: str) -> None:
        with pytest.raises(InvalidArgument, match=f"{option}=.*true or false"):
            read(**{option: text})

    @pytest.mark.parametrize("option", ["rowsPerPartition", "maxOffsetsPerTrigger"])
    @pytest.mark.parametrize("text", ["0", "-5", "1.5", "many", "²"])
    def test_invalid_counts_are_refused(self, option: str, text: str) -> None:
        with pytest.raises(InvalidArgument, match=f"{option}=.*whole number from 1"):
            read(**{option: text})

    @pytest.mark.parametrize("text", ["0", "x"])
    def test_invalid_number_of_buckets_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="numBuckets"):
            write(numBuckets=text)


class TestWrites:
    def test_write_options_are_parsed(self) -> None:
        found = write(
            numBuckets="7",
            bucketColumn="user",
            compression="zstd",
            writeId="night",
            vectors="a:3, b c:768",
        )
        assert (found.num_buckets, found.bucket_column) == (7, "user")
        assert (found.compression, found.write_id) == ("zstd", "night")
        assert found.vectors == {"a": 3, "b c": 768}

    @pytest.mark.parametrize("text", ["a", "a:", ":3", "a:0", "a:x", "a:3,", "a:-1"])
    def test_invalid_vectors_are_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match=r"vectors=.*name:length"):
            write(vectors=text)
