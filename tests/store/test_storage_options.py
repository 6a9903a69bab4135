"""Credentials and settings: what they mean, and that they are never shown."""

from __future__ import annotations

import logging
import pickle
import traceback

import pytest
from support.object_stores import SECRET, storage_options

from persisting.errors import InvalidArgument, StorageError
from persisting.store.object_store import open_store
from persisting.store.storage_options import StorageOptions, scrub_known
from persisting.store_address import SCHEMES, parse
from persisting.table.store_table import StoreTable

ALLOWING = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
GIVEN = {"aws_secret_access_key": "hunter2-secret", "aws_region": "here", "timeout": "3s"}


def test_repr_shows_names_and_no_values() -> None:
    shown = repr(StorageOptions(GIVEN))
    assert "aws_secret_access_key" in shown
    for value in GIVEN.values():
        assert value not in shown


def test_storage_options_are_divided_between_store_and_client() -> None:
    options = StorageOptions({**GIVEN, "allow_http": True})
    assert options.client_options == {"timeout": "3s", "allow_http": True}
    assert set(options.config) == {"aws_secret_access_key", "aws_region"}
    assert options.for_lance["allow_http"] == "true"


def test_names_of_storage_options_are_compared_without_case() -> None:
    assert StorageOptions({"AWS_REGION": "x"}) == StorageOptions({"aws_region": "x"})
    assert hash(StorageOptions({"AWS_REGION": "x"})) == hash(StorageOptions({"aws_region": "x"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "must be a dict"),
        ({1: "x"}, "names as keys"),
        ({"aws_region": ["x"]}, "aws_region must be a text"),
        ({"allow_http": "perhaps"}, "allow_http must be 'true' or 'false'"),
    ],
)
def test_malformed_options_are_refused(given: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        StorageOptions(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "aws_endpoint",
        "endpoint",
        "AWS_ENDPOINT_URL",
        "google_base_url",
        "azure_endpoint",
        "azure_storage_endpoint",
    ],
)
def test_plain_http_needs_allow_http(name: str) -> None:
    with pytest.raises(InvalidArgument, match="unencrypted"):
        StorageOptions({name: "http://127.0.0.1:9"})
    assert StorageOptions({name: "http://127.0.0.1:9", "allow_http": "true"}).config


def test_plain_http_from_the_environment_needs_allow_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(InvalidArgument, match="AWS_ALLOW_HTTP=true in the environment"):
        StorageOptions({"aws_region": "x"}).for_scheme("s3")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert StorageOptions().for_scheme("s3").client_options == {"allow_http": True}


@pytest.mark.parametrize(
    ("variable", "scheme"),
    [
        ("AWS_ENDPOINT", "s3"),
        ("AWS_ENDPOINT_URL", "s3"),
        ("GOOGLE_BASE_URL", "gs"),
        ("AZURE_ENDPOINT", "az"),
        ("AZURE_STORAGE_ENDPOINT", "az"),
    ],
)
def test_environment_counts_only_for_its_own_scheme(
    variable: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [other for other in SCHEMES if other != scheme]
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for other in others:
        assert StorageOptions().for_scheme(other).client_options == {}
        monkeypatch.setenv(ALLOWING[other], "true")
    with pytest.raises(InvalidArgument, match=f"{ALLOWING[scheme]}=true in the environment"):
        StorageOptions().for_scheme(scheme)
    monkeypatch.setenv(ALLOWING[scheme], "true")
    for other in others:
        monkeypatch.delenv(ALLOWING[other])
        assert StorageOptions().for_scheme(other).client_options == {}
    assert StorageOptions().for_scheme(scheme).client_options == {"allow_http": True}


def test_endpoint_without_a_scheme_in_its_name_counts_for_that_of_the_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    options = StorageOptions({"endpoint": "http://127.0.0.1:9"})
    assert options.for_scheme("az").client_options == {"allow_http": True}
    with pytest.raises(InvalidArgument, match="AWS_ALLOW_HTTP=true in the environment"):
        options.for_scheme("s3")


def test_stores_and_tables_refuse_plain_http_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    address = parse("s3://bucket/p")
    with pytest.raises(InvalidArgument, match="aws_endpoint means an http:// address"):
        open_store(address, StorageOptions())
    with pytest.raises(InvalidArgument, match="aws_endpoint means an http:// address"):
        StoreTable(address, StorageOptions())
    with pytest.raises(InvalidArgument, match="azure_storage_use_emulator means"):
        open_store(parse("az://bucket/p"), StorageOptions())


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9"),
        ("AZURE_ENDPOINT", "http://127.0.0.1:9"),
        ("AZURE_STORAGE_USE_EMULATOR", "true"),
    ],
)
def test_plain_http_of_azure_needs_the_variable_of_azure(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    with pytest.raises(InvalidArgument, match="AZURE_ALLOW_HTTP=true in the environment"):
        StorageOptions({variable.lower(): value})
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(InvalidArgument, match="AZURE_ALLOW_HTTP=true in the environment"):
        StorageOptions().for_scheme("az")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    assert StorageOptions().for_scheme("az").client_options == {"allow_http": True}


def test_unknown_option_is_refused_by_its_name_only() -> None:
    options = StorageOptions({"aws_scret_access_key": GIVEN["aws_secret_access_key"]})
    with pytest.raises(InvalidArgument, match="aws_scret_access_key") as caught:
        open_store(parse("s3://bucket/p"), options)
    assert "hunter2-secret" not in "".join(traceback.format_exception(caught.value))


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(InvalidArgument, match=r"persisting\[store\]"):
        open_store(parse("s3://bucket/p"), StorageOptions())


def test_texts_are_scrubbed_of_values_and_of_queries() -> None:
    options = StorageOptions(GIVEN)
    text = "PUT https://host/a?sig=abc&x=1 failed: hunter2-secret is wrong"
    assert options.scrub(text) == "PUT https://host/a failed: *** is wrong"


def test_credentials_of_the_environment_and_those_that_s3_repeats_are_scrubbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-test")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/run/token")
    answer = (
        "<Token-0>token-of-the-test</Token-0> token-of-the-test /run/token\n"
        "<AWSAccessKeyId>AKIA</AWSAccessKeyId><StringToSign>cut off"
    )
    assert StorageOptions().scrub(answer) == (
        "<Token-0>***</Token-0> *** /run/token\n"
        "<AWSAccessKeyId>***</AWSAccessKeyId><StringToSign>***</StringToSign>"
    )


def test_texts_of_unknown_origin_are_scrubbed_of_all_credentials_of_the_process() -> None:
    options = StorageOptions({**GIVEN, "allow_http": "true"})
    copied = pickle.loads(pickle.dumps(StorageOptions({"azure_storage_sas_key": "sig=abcd"})))  # noqa: S301
    assert scrub_known("hunter2-secret sig=abcd here true") == "*** *** here true"
    del options, copied


def test_refused_request_does_not_show_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = StorageOptions(storage_options(1, timeout="1s", connect_timeout="1s"))
    store = open_store(parse("s3://lab/p"), options, retry_seconds=0.1)
    with pytest.raises(StorageError) as caught:
        store.create("key", b"data")
    shown = "".join(traceback.format_exception(caught.value)) + repr(store) + caplog.text
    assert SECRET not in shown
    assert "127.0.0.1:1" in shown


def test_options_survive_pickling() -> None:
    options = StorageOptions(GIVEN)
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301
