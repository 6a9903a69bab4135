"""URLs of object stores."""

from __future__ import annotations

import pytest

from persisting.errors import InvalidArgument
from persisting.store_address import StoreAddress, is_store_address, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", StoreAddress("s3", "bucket")),
        ("s3://bucket/", StoreAddress("s3", "bucket")),
        ("S3://bucket/a/b/", StoreAddress("s3", "bucket", "a/b")),
        ("gs://my-bucket.x/a", StoreAddress("gs", "my-bucket.x", "a")),
        ("az://container/Ünï côde", StoreAddress("az", "container", "Ünï côde")),
    ],
)
def test_url_is_split_into_scheme_bucket_and_prefix(text: str, expected: StoreAddress) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3:bucket", "is not an address of an object store"),
        ("http://bucket/a", "is not an address of an object store"),
        ("s3://", "does not name a bucket"),
        ("s3:///a", "does not name a bucket"),
        ("s3://b ucket/a", "does not name a bucket"),
        ("s3://bucket/a//b", "has an empty part"),
        ("s3://bucket/a/../b", "has an empty part"),
        ("s3://bucket/a\nb", "control"),
        ("s3://bucket/a?x=1", "query or a fragment"),
        ("s3://bucket/a#b", "query or a fragment"),
    ],
)
def test_malformed_url_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse(text)


@pytest.mark.parametrize("text", ["s3://key:hunter2@bucket/a", "x3://key:hunter2@bucket/a"])
def test_password_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(text)
    assert "hunter2" not in str(caught.value)


def test_child_and_parent_of_an_address_are_inverse() -> None:
    address = parse("s3://bucket/root")
    assert str(address / "topic") == "s3://bucket/root/topic"
    assert (address / "topic").parent == address
    assert (address / "topic").name == "topic"
    assert str(parse("s3://bucket") / "topic") == "s3://bucket/topic"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("s3://b/p", True), ("AZ://b", True), ("/s3://b", False), ("file://b", False), (None, False)],
)
def test_only_urls_of_known_stores_are_store_addresses(path: object, expected: bool) -> None:
    assert is_store_address(path) is expected
