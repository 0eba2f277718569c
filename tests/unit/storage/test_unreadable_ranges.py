"""A member verifies its objects: what the device cannot read is damaged, and any other failure says nothing about the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.storage.base.checksums import cell_checksums
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.member.damaged_ranges import ChecksummedRange
from ckpt.storage.member.device import Device


@pytest.fixture(name="device")
def fixture_device(tmp_path: Path) -> Device:
    device = Device(tmp_path)
    device.store.put("a", bytes(100))
    return device


RANGES = [ChecksummedRange(0, 100, cell_checksums(memoryview(bytes(100))))]


def test_bytes_that_the_device_cannot_read_are_damaged(device: Device) -> None:
    set_failpoints("local.read=error@1")
    assert device.verify("a", RANGES) == [0]
    assert device.verify("a", RANGES) == []


def test_a_read_that_fails_otherwise_finds_no_damage(device: Device) -> None:
    set_failpoints("local.read=full@1")
    with pytest.raises(StoreError):
        device.verify("a", RANGES)
    assert device.verify("a", RANGES) == []
