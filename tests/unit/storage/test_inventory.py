"""The list of all objects of a member is read in parts."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from helpers.nodes import LocalNode, nodes_config, quick

from ckpt.aggregator.maintenance.scrub import scrub_namespace
from ckpt.storage.member.device import Device
from ckpt.storage.member.inventory import Inventory, InventoryPart, read_all_parts
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials

NAMES = ["07/one", "07/two", "1f/three", "a0/four", "ff/five"]


def device_with(folder: Path, names: list[str]) -> Device:
    device = Device(folder)
    for name in names:
        device.store.put(name, b"x" * len(name))
    return device


def test_parts_without_time_have_one_folder_each(tmp_path: Path) -> None:
    device = device_with(tmp_path, NAMES)
    parts: list[InventoryPart] = []

    def read(after: str) -> InventoryPart:
        parts.append(device.inventory_part(after, 0))
        return parts[-1]

    objects = read_all_parts(read)
    assert sorted(objects) == NAMES
    assert {name: nbytes for name, (nbytes, _) in objects.items()} == {name: len(name) for name in NAMES}
    assert [part.last_folder for part in parts] == ["07", "1f", "a0", None]
    device.close()


@pytest.mark.parametrize("names", [[], ["07/one"]])
def test_one_part_is_enough_for_a_few_objects(tmp_path: Path, names: list[str]) -> None:
    device = device_with(tmp_path, names)
    part = device.inventory_part("", 0)
    assert (sorted(part.objects), part.last_folder) == (names, None)
    device.close()


def test_a_folder_that_appears_between_two_parts_is_read(tmp_path: Path) -> None:
    device = device_with(tmp_path, NAMES)
    first = device.inventory_part("", 0)
    device.store.put("2a/new", b"")
    assert first.last_folder == "07"
    assert list(device.inventory_part("1f", 0).objects) == ["2a/new"]
    device.close()


def test_an_older_node_lists_all_objects_in_one_call(tmp_path: Path) -> None:
    node = LocalNode(tmp_path)
    del node.server._handlers["inventory.part"]
    client = NodeStore(node.address, NodeCredentials())
    client.put("07/one", b"1")
    part = client.inventory_part()
    assert (list(part.objects), part.last_folder) == (["07/one"], None)
    client.close()
    node.close()


@pytest.mark.slow
def test_a_node_whose_list_takes_longer_than_the_deadline_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk needs half a second for each folder, and the deadline is four seconds."""
    node = LocalNode(tmp_path)
    config = nodes_config([node], redundancy="1x", deadline_seconds=4.0)
    read_folder = Device._inventory_of

    def slowly(device: Device, folder: str) -> Inventory:
        time.sleep(0.5)
        return read_folder(device, folder)

    with contextlib.closing(quick(config)) as namespace:
        for number in range(20):
            namespace.put(f"f{number}", b"content" * 50_000)
        monkeypatch.setattr(Device, "_inventory_of", slowly)
        assert len(list(node.device.store.list_folders())) > 10
        report = scrub_namespace(namespace)
    assert report.missing_members == {}
    assert report.is_whole
    assert report.files == 20
    node.close()
