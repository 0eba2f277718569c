"""A source that can't be read now does not count as damaged, and nothing of it is left out."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.messages import one_line

from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.tools import import_dcp, import_megatron, import_orbax, import_torch
from ckpt.tools.import_formats import read_source

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


@pytest.fixture(name="folder")
def make_folder() -> Iterator[Path]:
    """Return a folder that is not below tmp_path, whose parents another user may not search."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@contextmanager
def unlistable(folder: Path) -> Iterator[None]:
    """A context in which the names in a folder can't be read, but its files can."""
    user = os.geteuid()
    os.chmod(folder, 0o711 if user == 0 else 0o111)
    try:
        if user == 0:  # root may read all
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        os.chmod(folder, 0o755)


def universal(folder: Path) -> Path:
    """Return the folder of a parameter in a checkpoint of ds_to_universal with two."""
    for name in "ab":
        parameter = folder / "zero" / name
        parameter.mkdir(parents=True)
        for state in ("fp32", "exp_avg"):
            torch.save({"param": torch.ones(3)}, parameter / f"{state}.pt")
    assert set(read_source(folder, None)["model"]) == {"a", "b"}
    return parameter


def test_a_parameter_without_its_weights_is_not_left_out(tmp_path: Path) -> None:
    parameter = universal(tmp_path)
    (parameter / "fp32.pt").unlink()
    with pytest.raises(CkptError) as raised:
        read_source(tmp_path, None)
    one_line(raised, f"{parameter} has no fp32.pt", "incomplete: copy or convert it again")


def test_a_parameter_whose_files_cannot_be_listed_is_not_left_out(folder: Path) -> None:
    parameter = universal(folder)
    with unlistable(parameter), pytest.raises(CkptError) as raised:
        read_source(folder, None)
    one_line(raised, f"{parameter} can't be listed: Permission denied")


def test_a_missing_file_of_several_without_an_index_is_named(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    for number, name in enumerate("abc", 1):
        numpy.save_file({name: np.ones(2)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    numpy.save_file({"d": np.ones(2)}, tmp_path / "other.safetensors")
    assert set(read_source(tmp_path, None)) == {*"abcd"}
    for missing in (1, 2, 3):
        path = tmp_path / f"model-0000{missing}-of-00003.safetensors"
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(CkptError) as raised:
            read_source(tmp_path, None)
        one_line(raised, f"{path.name} is missing: download it")
        path.write_bytes(data)


def test_a_newest_step_of_orbax_that_cannot_be_listed_is_not_replaced_by_an_older_one(folder: Path) -> None:
    for step in ("7", "8"):
        (folder / step / "default").mkdir(parents=True)
        (folder / step / "default" / "_METADATA").touch()
    assert import_orbax._folder_of_arrays(folder) == folder / "8" / "default"
    with unlistable(folder / "8"), pytest.raises(CkptError) as raised:
        import_orbax._folder_of_arrays(folder)
    one_line(raised, f"{folder}/8 can't be listed: Permission denied")


def test_steps_of_orbax_whose_names_begin_with_zeros_are_found(tmp_path: Path) -> None:
    for step in ("0098", "0099"):
        (tmp_path / step / "default").mkdir(parents=True)
        (tmp_path / step / "default" / "_METADATA").touch()
    assert import_orbax._folder_of_arrays(tmp_path) == tmp_path / "0099" / "default"


def test_a_lack_of_memory_is_no_damage_of_the_common_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"iteration": 7}, tmp_path / import_megatron.COMMON)

    def fail(*args: object, **options: object) -> object:
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(StoreError) as raised:
        import_megatron._read_common(tmp_path / import_megatron.COMMON)
    one_line(raised, "reading", "MemoryError", "free memory")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(CkptError) as raised:
            read_source(source, None)
        one_line(raised, f"{source} is neither a file nor a folder")
