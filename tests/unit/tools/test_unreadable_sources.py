"""A source that can't be read now does not count as damaged, and nothing of it is left out."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.messages import one_line

from ckpt.storage.base.errors import StoreError
from ckpt.tools import import_dcp, import_megatron, import_torch

torch = pytest.importorskip("torch")


class _FailingFile(io.BytesIO):
    """A file on a disk that fails from the given read on."""

    def __init__(self, data: bytes, first_failing_read: int) -> None:
        super().__init__(data)
        self.reads_left = first_failing_read

    def read(self, *args: Any) -> bytes:
        if self.reads_left <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.reads_left -= 1
        return super().read(*args)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def test_a_failing_disk_is_no_damage_of_a_torch_file() -> None:
    """Whichever read fails: that of the byte order, of the checksums, or of torch itself."""
    saved = io.BytesIO()
    torch.save({"w": torch.ones(1000), "step": 3}, saved)
    number = 0
    while True:
        file = _FailingFile(saved.getvalue(), number)
        try:
            import_torch.read_slice(file, "a.pt", 0, "a.pt")
            break
        except StoreError as error:
            assert (
                str(error)
                == "reading a.pt failed: [Errno 5] Input/output error; check the disk and the free memory, and try again"
            )
        number += 1
    assert number > 10


def test_an_unreadable_object_of_megatron_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"rng": [3, "cpu"]}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"iteration": 7}, tmp_path / import_megatron.COMMON)
    assert import_megatron.read_state(tmp_path) == {"tensors": {}, "objects": {"rng": [3, "cpu"]}, "common": {"iteration": 7}}

    def fail(self: object, buffer: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(import_dcp._Slice, "readinto", fail)
    with pytest.raises(StoreError) as raised:
        import_megatron.read_state(tmp_path)
    one_line(raised, "reading", "Input/output error")


def test_a_lack_of_memory_is_no_damage_of_the_common_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"iteration": 7}, tmp_path / import_megatron.COMMON)

    def fail(*args: object, **options: object) -> object:
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(StoreError) as raised:
        import_megatron._read_common(tmp_path / import_megatron.COMMON)
    one_line(raised, "reading", "MemoryError", "free memory")
