"""The namespace as a mounted directory, used by common programs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from helpers.mounts import why_no_fuse
from helpers.nodes import NodeProcess

from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.storage.testing import random_bytes

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")


class Mounted:
    """A mounted namespace of three nodes."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [NodeProcess(folder / f"n{i}") for i in range(3)]
        self.folder = folder / "mnt"
        self.folder.mkdir()
        self.url = f"ckpt://{','.join(n.address for n in self.nodes)}/"
        self.mount()

    def mount(self) -> None:
        command = [sys.executable, "-m", "ckpt.tools.mount", self.url, str(self.folder)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 600
        while not os.path.ismount(self.folder):
            if self.process.poll() is not None or time.monotonic() > deadline:
                assert self.process.stderr is not None
                self.process.kill()
                pytest.fail(f"not mounted: {self.process.stderr.read()}")
            time.sleep(0.05)

    def unmount(self) -> None:
        subprocess.run([shutil.which("fusermount3") or "fusermount", "-uz", str(self.folder)], check=False)
        self.process.terminate()  # ends it also if another mount namespace still has a copy of the mount
        self.process.wait(600)

    def close(self) -> None:
        self.unmount()
        for node in self.nodes:
            node.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    made = Mounted(tmp_path)
    yield made
    made.close()


@pytest.fixture
def mount(mounted: Mounted) -> Path:
    return mounted.folder


def test_common_programs_work_on_a_mount(mount: Path, tmp_path: Path) -> None:
    data = random_bytes(19_000_001)
    (tmp_path / "x").write_bytes(data)
    subprocess.run(["cp", str(tmp_path / "x"), str(mount / "a")], check=True)
    assert (mount / "a").read_bytes() == data
    assert (mount / "a").stat().st_size == len(data)
    (mount / "d" / "e").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(mount / "a"), str(mount / "d" / "e" / "b")], check=True)
    subprocess.run(["mv", str(mount / "d"), str(mount / "moved")], check=True)
    assert sorted(os.listdir(mount)) == ["a", "moved"]
    assert (mount / "moved" / "e" / "b").read_bytes() == data
    subprocess.run(["sh", "-c", f"echo one > {mount}/log; echo two >> {mount}/log"], check=True)
    assert (mount / "log").read_text() == "one\ntwo\n"
    archive = tmp_path / "all.tar"
    subprocess.run(["tar", "-cf", str(archive), "-C", str(mount), "."], check=True)
    subprocess.run(["rm", "-r", str(mount / "moved")], check=True)
    assert sorted(os.listdir(mount)) == ["a", "log"]
    (mount / "new").mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(mount / "new")], check=True)
    assert (mount / "new" / "moved" / "e" / "b").read_bytes() == data


def test_unsupported_operations_on_a_mount_are_refused(mount: Path) -> None:
    (mount / "a").write_bytes(b"hello")
    with pytest.raises(OSError, match="not supported") as refused, open(mount / "a", "r+b") as file:
        file.write(b"x")
    assert refused.value.errno == errno.EOPNOTSUPP
    assert (mount / "a").read_bytes() == b"hello"
    with pytest.raises(FileNotFoundError):
        (mount / "none").read_bytes()
    with pytest.raises(OSError, match="not supported"):
        os.truncate(mount / "a", 3)
    with pytest.raises(FileExistsError):
        (mount / "a").mkdir()
    (mount / "d").mkdir()
    (mount / "d" / "x").write_bytes(b"")
    with pytest.raises(OSError, match="not empty"):
        (mount / "d").rmdir()


def test_a_file_is_written_synced_and_renamed_on_a_mount(mount: Path) -> None:
    (mount / "final").write_bytes(b"before")
    for data in (b"payload", random_bytes(19_000_001)):
        with NamedTemporaryFile(dir=mount, delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            assert Path(file.name).read_bytes() == data
            os.replace(file.name, mount / "final")
            assert (mount / "final").read_bytes() == data
        folder = os.open(mount, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        assert os.listdir(mount) == ["final"]
        assert (mount / "final").read_bytes() == data


def test_a_file_is_renamed_or_deleted_while_it_is_written(mount: Path) -> None:
    with open(mount / "a", "wb", buffering=0) as file:
        file.write(b"1")
        (mount / "a").rename(mount / "b")
        file.write(b"2")
    assert (mount / "b").read_bytes() == b"12"
    with open(mount / "u", "wb", buffering=0) as file:
        file.write(b"zz")
        (mount / "u").unlink()
        file.write(b"zz")
    (mount / "old").mkdir()
    with open(mount / "old" / "x", "wb", buffering=0) as file, open(mount / "b", "ab", buffering=0) as replaced:
        file.write(b"1" * 100_000)
        replaced.write(b"3")
        (mount / "new").mkdir()
        (mount / "old").rename(mount / "new")
        (mount / "new" / "x").replace(mount / "b")
        file.write(b"2")
    assert (mount / "b").read_bytes() == b"1" * 100_000 + b"2"
    assert sorted(os.listdir(mount)) == ["b", "new"]
    assert os.listdir(mount / "new") == []
    (mount / "full").mkdir()
    (mount / "full" / "x").write_bytes(b"x")
    with pytest.raises(OSError, match="not empty"):
        (mount / "new").rename(mount / "full")
    assert (mount / "full" / "x").read_bytes() == b"x"


@pytest.mark.parametrize("size", [100, 5000, 9_000_000])
def test_a_file_that_is_read_while_it_grows_keeps_every_byte(mount: Path, size: int) -> None:
    """The kernel takes a short read for the end of the file, and the next append begins there."""
    (mount / "log").write_bytes(b"1" * size)
    reader = os.open(mount / "log", os.O_RDONLY)
    writer = os.open(mount / "log", os.O_WRONLY | os.O_APPEND)
    os.write(writer, b"2" * size)
    assert os.pread(reader, 2 * size, 0) == b"1" * size + b"2" * size
    os.write(writer, b"3" * size)
    os.close(writer)
    assert os.pread(reader, size, 2 * size) == b"3" * size
    with (mount / "log").open("ab", buffering=0) as file:
        file.write(b"4" * size)
    assert os.pread(reader, size, 3 * size) == b"4" * size
    os.close(reader)
    assert (mount / "log").read_bytes() == b"".join(line * size for line in (b"1", b"2", b"3", b"4"))


def test_synced_bytes_survive_a_killed_mount(mounted: Mounted) -> None:
    files = {n: os.open(mounted.folder / str(n), os.O_CREAT | os.O_WRONLY) for n in (10, 100_000, 9_000_000)}
    for n, file in files.items():
        os.write(file, b"x" * n)
        os.fsync(file)
        os.write(file, b"later")
    mounted.process.kill()
    mounted.unmount()
    for file in files.values():
        with pytest.raises(OSError, match="not connected"):
            os.fsync(file)
        with suppress(OSError):  # the mount of these files is gone
            os.close(file)
    mounted.mount()
    for n in files:
        assert (mounted.folder / str(n)).read_bytes() == b"x" * n


def test_checkpoints_are_saved_and_loaded_through_a_mount(mount: Path) -> None:
    import numpy as np

    import ckpt

    state = {"w": np.arange(3_000_000.0)}
    ckpt.save(state, mount / "run", 1)
    assert np.array_equal(ckpt.load(mount / "run")["w"], state["w"])


@pytest.mark.parametrize("lengths", [(3000, 13_000), (13_000, 3000), (100, 3_000_000), (3_000_000, 1_000_000)])
def test_a_file_that_another_client_has_replaced_is_read_whole(mounted: Mounted, lengths: tuple[int, int]) -> None:
    namespace, _ = open_namespace(mounted.url)
    before, after = (random_bytes(n) for n in lengths)
    file = mounted.folder / "a"
    for _ in range(3):
        namespace.put("a", before)
        assert file.read_bytes() == before
        assert file.stat().st_size == len(before)
        namespace.put("a", after)
        assert file.read_bytes() == after


def test_an_append_begins_at_the_end_of_what_another_client_wrote(mounted: Mounted) -> None:
    namespace, _ = open_namespace(mounted.url)
    for before, after in ((1000, 500), (500, 1000), (50_000, 40_000)):
        (mounted.folder / "log").write_bytes(b"1" * before)
        assert (mounted.folder / "log").stat().st_size == before
        namespace.put("log", b"2" * after)
        with (mounted.folder / "log").open("ab") as file:
            file.write(b"3")
        assert namespace.get("log") == b"2" * after + b"3"


@pytest.mark.parametrize("lengths", [(12_000, 30_000), (30_000, 12_000), (3_000_000, 12_000)])
def test_an_old_handle_shows_no_old_bytes_to_new_ones(mounted: Mounted, lengths: tuple[int, int]) -> None:
    """All handles of a file share the pages that the kernel has cached."""
    namespace, _ = open_namespace(mounted.url)
    before, after = (random_bytes(n, seed) for seed, n in enumerate(lengths))
    namespace.put("a", before)
    old = os.open(mounted.folder / "a", os.O_RDONLY)
    namespace.put("a", after)
    new = os.open(mounted.folder / "a", os.O_RDONLY)
    with pytest.raises(OSError, match="Stale") as refused:
        os.pread(old, len(before), 0)
    assert refused.value.errno == errno.ESTALE
    assert os.pread(new, len(before) + len(after), 0) == after
    os.close(old)
    os.close(new)


@pytest.mark.parametrize("size", [100, 20_000, 3_000_000])
def test_a_handle_reads_on_in_a_file_that_another_client_appends_to(mounted: Mounted, size: int) -> None:
    namespace, _ = open_namespace(mounted.url)
    data = random_bytes(3 * size)
    namespace.put("log", data[:size])
    reader = os.open(mounted.folder / "log", os.O_RDONLY)
    assert os.pread(reader, 9 * size, 0) == data[:size]
    for n in (1, 2):
        with namespace.create("log", aligned=False, base=namespace.stat("log")) as writer:
            writer.append(memoryview(data[n * size : (n + 1) * size]))
            writer.commit()
        assert (mounted.folder / "log").stat().st_size == (n + 1) * size
        assert os.pread(reader, 9 * size, 0) == data[: (n + 1) * size]
    os.close(reader)


@pytest.mark.parametrize("size", [3000, 3_000_000])
def test_a_handle_reads_what_the_same_mount_writes_in_place_of_the_file(mount: Path, size: int) -> None:
    file = mount / "a"
    for before, after in ((1, 1), (1, 2), (2, 1)):
        file.write_bytes(b"1" * before * size)
        reader = os.open(file, os.O_RDONLY)
        assert os.pread(reader, 9 * size, 0) == b"1" * before * size
        with file.open("wb", buffering=0) as writer:
            writer.write(b"2" * after * size)
            assert os.pread(reader, 9 * size, 0) == b"2" * after * size
            os.fsync(writer.fileno())
            assert os.pread(reader, 9 * size, 0) == b"2" * after * size
            assert file.read_bytes() == b"2" * after * size
        assert os.pread(reader, 9 * size, 0) == b"2" * after * size
        os.close(reader)


def test_a_truncation_of_a_file_replaced_meanwhile_is_refused(mounted: Mounted) -> None:
    namespace, _ = open_namespace(mounted.url)
    namespace.put("a", b"old")
    file = os.open(mounted.folder / "a", os.O_WRONLY)
    namespace.put("a", b"of another")
    with pytest.raises(OSError, match="Stale") as refused:
        os.ftruncate(file, 0)
    assert refused.value.errno == errno.ESTALE
    os.close(file)
    assert namespace.get("a") == b"of another"
    file = os.open(mounted.folder / "a", os.O_WRONLY)
    os.ftruncate(file, 0)
    os.write(file, b"new")
    os.close(file)
    assert namespace.get("a") == b"new"
    (mounted.folder / "a").write_bytes(b"newer")
    assert namespace.get("a") == b"newer"


def test_file_names_that_are_not_text_are_refused(mounted: Mounted) -> None:
    folder = os.fsencode(mounted.folder)
    for wrong in (b"\xff", b"a\xe4b"):
        for refused in (
            lambda name: os.open(name, os.O_CREAT | os.O_WRONLY), os.stat, os.mkdir, os.listdir, os.unlink,
            lambda name: os.rename(folder + b"/fine", name),
        ):  # fmt: skip
            (mounted.folder / "fine").write_bytes(b"1")
            with pytest.raises(OSError, match="Invalid argument"):
                refused(folder + b"/" + wrong)
    text = "\u00e4\u20ac\U0001f600"
    (mounted.folder / text).write_bytes(b"1")
    assert sorted(os.listdir(mounted.folder)) == ["fine", text]
    mounted.unmount()
    assert mounted.process.stderr is not None
    assert "Traceback" not in mounted.process.stderr.read()
