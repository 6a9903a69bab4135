"""Addresses of topics, and their form on the wire."""

from __future__ import annotations

from pathlib import Path

from persisting.topic.address import TopicAddress


def test_memory_topic_is_written_with_a_prefix() -> None:
    address = TopicAddress.in_memory("orders")
    assert str(address) == "memory:orders"
    assert TopicAddress.parse("memory:orders") == address
    assert address.is_in_memory


def test_topic_on_disk_is_written_as_its_path(tmp_path: Path) -> None:
    address = TopicAddress.in_folder(tmp_path / "orders")
    assert str(address) == str(tmp_path / "orders")
    assert TopicAddress.parse(str(address)) == address
    assert (address.topic, address.is_in_memory) == ("orders", False)


def test_two_paths_to_one_folder_are_one_address(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    direct = TopicAddress.in_folder(tmp_path / "here" / "orders")
    assert TopicAddress.in_folder(tmp_path / "link" / "orders") == direct
