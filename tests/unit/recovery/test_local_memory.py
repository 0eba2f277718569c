"""The folder of the memory tier: what happens where the shared memory of a host cannot be used."""

from __future__ import annotations

import errno
import functools
from pathlib import Path

import pytest

from ckpt.recovery.memory_tier import local
from ckpt.storage.base.errors import StoreError
from ckpt.tiers.memory_folder import MEMORY_VARIABLE, own_memory_folder


@pytest.fixture(autouse=True)
def no_named_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)


def shared_memory_at(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "own_memory_folder", functools.partial(own_memory_folder, base))


def test_each_run_folder_and_each_host_has_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory_at(tmp_path, monkeypatch)
    folders = [local.memory_folder(tmp_path / run, host) for run in ("a", "b") for host in ("", "host1")]
    assert None not in folders
    assert len(set(folders)) == 4
    assert folders[0] == local.memory_folder(tmp_path / "a")


def test_a_system_without_shared_memory_has_no_memory_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared_memory_at(tmp_path / "missing", monkeypatch)
    assert local.memory_folder(tmp_path / "run") is None
    assert not caplog.records


def test_shared_memory_that_is_unusable_is_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "file"
    base.write_bytes(b"")  # a file in place of the folder
    shared_memory_at(base, monkeypatch)
    assert local.memory_folder(tmp_path / "run") is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{base}/ckpt-" in record.getMessage()


def test_a_momentary_lack_stops_the_start_as_the_memory_may_have_the_newest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    shared_memory_at(tmp_path, monkeypatch)
    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(StoreError, match="start ckpt-run again"):
        local.memory_folder(tmp_path / "run")
