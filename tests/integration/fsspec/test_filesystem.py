"""The namespace as an fsspec filesystem: refusals, folders, open files."""

from __future__ import annotations

import errno
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.filesystems import address as address
from helpers.filesystems import filesystem as filesystem

import ckpt
from ckpt.aggregator.interfaces.fsspec_file import call_with_os_errors
from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem
from ckpt.storage.base.errors import AlreadyExists, Changed, NoSpace, NotFound, Refused, StoreError, Unavailable
from ckpt.storage.testing import random_bytes


def test_a_url_alone_opens_the_filesystem(address: str, filesystem: CkptFileSystem) -> None:
    url = f"ckpt://{address}/a/b.txt"
    with fsspec.open(url, "w") as file:
        file.write("hello")
    with fsspec.open(url) as file:
        assert file.read() == b"hello"
    found, path = fsspec.core.url_to_fs(f"{url}?redundancy=1x")
    assert path == f"{address}/a/b.txt", "the path does not have its namespace, so no URL can be made from it again"
    assert found.cat(path) == found.cat("a/b.txt") == b"hello"
    assert found.unstrip_protocol("a/b.txt") == url
    assert fsspec.core.url_to_fs(url)[0] is filesystem


def test_urls_mean_the_same_as_for_checkpoints(address: str, filesystem: CkptFileSystem) -> None:
    near = address.split(",")[1]
    with fsspec.open(f"ckpt://{address}/a/b?near={near}&redundancy=3x", "wb") as file:
        file.write(b"1" * 100_000)
    found, path = fsspec.core.url_to_fs(f"ckpt://{address}/a/b?near={near}&redundancy=3x")
    assert found.cat(path) == b"1" * 100_000
    assert found.namespace.config.host_domain == (near,)
    layout = filesystem.namespace.stat("a/b").layout
    assert layout is not None
    assert str(layout.redundancy) == "3x"
    with pytest.raises(ValueError, match="near=host9:7070 is not one of the nodes"):
        fsspec.open(f"ckpt://{address}/a/b?near=host9:7070")
    with pytest.raises(ValueError, match="unknown option 'far'"):
        fsspec.open(f"ckpt://{address}/a/b?far={near}")
    url = f"ckpt://{address}/my%20run%25"
    ckpt.save({"w": np.arange(3.0)}, url, 1)
    assert filesystem.exists(url)
    assert filesystem.ls("", detail=False) == ["a", "my run%"]
    for name in ("my run%", "a b", "ü", "100%25", "what?", "50%#+&=,:[x]"):
        filesystem.pipe(name, b"1") if name != "my run%" else None
        again = filesystem.unstrip_protocol(name)
        assert filesystem.resolve(filesystem._strip_protocol(again)).path == name
        assert fsspec.core.url_to_fs(again) == (filesystem, filesystem._strip_protocol(again))
        assert filesystem.exists(again)


def test_a_listing_shows_files_and_folders(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    for path, data in {"r/a": b"1", "r/b/c": b"22", "r/b/d/e.txt": b"333", "x": b""}.items():
        fs.pipe(path, data)
    assert fs.ls("r", detail=False) == ["r/a", "r/b"]
    assert [(i["name"], i["type"], i["size"]) for i in fs.ls("r")] == [("r/a", "file", 1), ("r/b", "directory", 0)]
    assert fs.ls("", detail=False) == ["r", "x"]
    assert fs.find("r") == ["r/a", "r/b/c", "r/b/d/e.txt"]
    assert fs.find("r", withdirs=True) == ["r", "r/a", "r/b", "r/b/c", "r/b/d", "r/b/d/e.txt"]
    assert fs.find("r", maxdepth=1) == ["r/a"]
    assert fs.glob("r/**/*.txt") == ["r/b/d/e.txt"]
    assert fs.glob("r/*") == ["r/a", "r/b"]
    assert [(root, sorted(d), sorted(f)) for root, d, f in fs.walk("r")] == [
        ("r", ["b"], ["a"]), ("r/b", ["d"], ["c"]), ("r/b/d", [], ["e.txt"]),
    ]  # fmt: skip
    assert fs.du("r") == 6
    assert fs.exists("r/b")
    assert fs.isdir("r/b")
    assert fs.isfile("r/b/c")
    assert not fs.exists("none")
    assert fs.info("r/b/c")["size"] == 2
    with pytest.raises(FileNotFoundError):
        fs.info("none")
    with pytest.raises(FileNotFoundError):
        fs.ls("none")


def test_times_and_checksums_change_with_the_content(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    fs.pipe("a", b"1")
    first = fs.checksum("a")
    created = fs.created("a")
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=5)
    fs.pipe("a", b"2")
    assert fs.checksum("a") != first
    assert fs.created("a") == created
    assert fs.modified("a") > created


def test_files_are_moved_and_copied(filesystem: CkptFileSystem, tmp_path: Path) -> None:
    fs = filesystem
    data = random_bytes(9_000_000)
    fs.pipe("a/big", data)
    fs.cp("a/big", "b/copy")
    fs.mv("a/big", "c/moved")
    assert fs.cat("b/copy") == fs.cat("c/moved") == data
    assert fs.find("") == ["b/copy", "c/moved"]
    fs.get("c/moved", str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == data
    fs.put(str(tmp_path / "x"), "back")
    assert fs.cat("back") == data
    parts = fs.cat_ranges(["back"] * 3, [0, 4_000_000, -5], [3, 4_000_010, None])
    assert parts == [data[:3], data[4_000_000:4_000_010], data[-5:]]
    assert fs.cat_file("back", start=-10, end=-3) == data[-10:-3]
    fs.rm("b", recursive=True)
    assert not fs.exists("b")
    with pytest.raises(FileNotFoundError):
        fs.rm("none")


def test_folders_are_created_and_removed(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    fs.mkdir("empty")
    assert fs.isdir("empty")
    assert fs.ls("empty") == []
    with pytest.raises(FileExistsError):
        fs.mkdir("empty")
    fs.makedirs("empty", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("empty")
    fs.pipe("empty/a", b"")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("empty")
    with pytest.raises((IsADirectoryError, OSError)):
        fs.rm("empty")
    fs.rm("empty/a")
    fs.rmdir("empty")
    assert not fs.exists("empty")
    fs.touch("t")
    fs.pipe("t", b"1")
    fs.touch("t", truncate=False)
    assert fs.cat("t") == b"1"
    fs.touch("t")
    assert fs.cat("t") == b""


def test_an_operation_that_would_lose_a_file_is_refused(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    everything = {"d/a": b"1", "d/e/b": b"2", "file": b"precious", "o": b"3"}
    fs.pipe(everything)
    fs.mkdir("empty")
    for refused, error in (
        (lambda: fs.rmdir("file"), NotADirectoryError),
        (lambda: fs.rmdir("d"), OSError),
        (lambda: fs.rmdir("none"), FileNotFoundError),
        (lambda: fs.rmdir(""), OSError),
        (lambda: fs.rm("d"), IsADirectoryError),
        (lambda: fs.rm(["o", "d"]), IsADirectoryError),
        (lambda: fs.rm_file("empty"), IsADirectoryError),
        (lambda: fs.rm_file("d"), IsADirectoryError),
        (lambda: fs.mkdir("file"), FileExistsError),
        (lambda: fs.mkdir("file/below"), NotADirectoryError),
        (lambda: fs.makedirs("file/below/it", exist_ok=True), NotADirectoryError),
        (lambda: fs.pipe("empty", b"x"), FileExistsError),
        (lambda: fs.open("empty", "ab"), IsADirectoryError),
        (lambda: fs.mv("d", "x"), IsADirectoryError),
        (lambda: fs.mv("d", "d/x", recursive=True), OSError),
        (lambda: fs.mv("d", "d/", recursive=True), OSError),
        (lambda: fs.mv("d", "d", recursive=True), OSError),
        (lambda: fs.mv("d/", "file", recursive=True), NotADirectoryError),
        (lambda: fs.mv("d/", "x", recursive=True, maxdepth=1), ValueError),
        (lambda: fs.mv(["o", "none"], "y/"), FileNotFoundError),
        (lambda: fs.mv(["d/a", "x/a"], "y/"), ValueError),
        (lambda: fs.mv("none", "x"), FileNotFoundError),
    ):
        with pytest.raises(error):
            refused()
        assert fs.cat(fs.find("")) == everything
        assert fs.isdir("empty")
    with pytest.raises(IsADirectoryError, match="mv"):
        fs.mv("d", "x")
    fs.rm("d", recursive=True, maxdepth=1)
    assert fs.find("d") == ["d/e/b"]


def test_no_path_below_a_file_can_be_used(filesystem: CkptFileSystem, tmp_path: Path) -> None:
    fs = filesystem
    everything = {"d/e/a": b"1", "file": b"precious"}
    fs.pipe(everything)
    (tmp_path / "x").write_bytes(b"2")
    for path in ("file/x", "file/x/y"):
        for refused in (
            lambda path: fs.pipe(path, b"2"),
            lambda path: fs.pipe(path, b"2" * 100_000),
            lambda path: fs.touch(path),
            lambda path: fs.touch(path, truncate=False),
            lambda path: fs.put_file(tmp_path / "x", path),
            lambda path: fs.cp_file("file", path),
            lambda path: fs.mv(["file"], [path]),
            *(lambda path, mode=mode: fs.open(path, mode) for mode in ("wb", "ab", "xb")),
        ):
            with pytest.raises(NotADirectoryError):
                refused(path)
            assert fs.cat(fs.find("")) == everything
    with pytest.raises(NotADirectoryError):
        fs.mv("d", "file/sub", recursive=True)
    fs.rm("d", recursive=True)
    fs.pipe("d", b"a file now")
    with pytest.raises(NotADirectoryError):
        fs.pipe("d/e/a", b"1")
    fs.rm("d")
    fs.pipe("d/e/a", b"1")
    assert fs.find("") == ["d/e/a", "file"]


def test_folders_are_moved(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    big = random_bytes(100_000)
    fs.pipe({"d/a": b"1", "d/e/b": big, "o": b"3"})
    fs.mkdir("d/empty")
    fs.mkdir("there")
    fs.mv("o", "there")
    fs.mv("d", "there", recursive=True)
    assert fs.find("") == ["there/d/a", "there/d/e/b", "there/o"]
    assert fs.isdir("there/d/empty")
    assert not fs.exists("d")
    fs.mv("there/d/", "new", recursive=True)
    assert fs.cat("new/e/b") == big
    fs.mv("new/*", "flat/", recursive=True)
    assert fs.find("") == ["flat/a", "flat/e/b", "there/o"]
    fs.mv(["flat/a", "there/o"], ["1", "2"])
    assert fs.find("") == ["1", "2", "flat/e/b"]
    fs.mv(["1", "2"], "both")
    assert fs.find("both") == ["both/1", "both/2"]
    assert fs.namespace.stat("flat/e/b").head.nbytes == len(big)


def test_open_files_are_written_appended_and_read(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    data = random_bytes(13_000_001)
    with fs.open("a", "wb") as file:
        for start in range(0, len(data), 777_777):
            file.write(data[start : start + 777_777])
        assert not fs.exists("a"), "the file exists before it is closed"
    with fs.open("a") as file:
        assert file.size == len(data)
        file.seek(12_000_000)
        assert file.read(100) == data[12_000_000:12_000_100]
        file.seek(0)
        assert file.read() == data
    for n in (10, 100_000):
        with fs.open(f"log{n}", "wb") as file:
            file.write(b"x" * n)
        for _ in range(3):
            with fs.open(f"log{n}", "ab") as file:
                assert file.tell() in (n, n + 5, n + 10)
                file.write(b"hello")
        assert fs.cat(f"log{n}") == b"x" * n + b"hello" * 3
    with fs.open("new", "ab") as file:
        file.write(b"1")
    with pytest.raises(FileExistsError), fs.open("new", "xb") as file:
        file.write(b"2")
    assert fs.cat("new") == b"1"
    with pytest.raises(ValueError, match="rb, wb, ab or xb"):
        fs.open("new", "r+b")
    with pytest.raises(FileNotFoundError):
        fs.open("none")
    with pytest.raises(ValueError, match="can't name a file"):
        fs.pipe("a/../b", b"")


def test_a_write_does_not_replace_what_another_client_wrote_meanwhile(
    filesystem: CkptFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = filesystem
    for path, before, after in (("none", None, b"2" * 10), ("empty", b"", b"2" * 100_000), ("a", b"0", b"2")):
        if before is not None:
            fs.pipe(path, before)
        for size in (1, 100_000):
            file = fs.open(path, "ab")
            file.write(b"1" * size)
            fs.pipe(path, after)
            with pytest.raises(OSError, match="meanwhile|during the append") as refused:
                file.close()
            assert refused.value.errno == errno.ESTALE
            assert fs.cat(path) == after
            fs.rm(path)
            if before is not None:
                fs.pipe(path, before)
    nodes = fs.namespace.open_members.values()
    assert not any(node.inventory() or node.info().uploads for node in nodes), "a refused write leaves an object"
    stat = fs.namespace.stat

    def stat_then_write(path: str) -> Any:
        found = stat(path)
        fs.pipe(path, b"precious")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(fs.namespace, "stat", stat_then_write)
        fs.touch("t", truncate=False)
    assert fs.cat("t") == b"precious"


def test_a_folder_that_cannot_be_listed_is_not_empty(
    filesystem: CkptFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = filesystem
    everything = {f"r/s{i}/f{j}": b"x" for i in range(3) for j in range(2)}
    fs.pipe(everything)
    listed = fs.namespace.list

    def some(folder: str = "") -> Any:
        if folder == "r/s1":
            raise Unavailable("two members are missing")
        return listed(folder)

    with monkeypatch.context() as patched:
        patched.setattr(fs.namespace, "list", some)
        for work in (
            lambda: fs.get("r", str(tmp_path / "got"), recursive=True),
            lambda: fs.cp("r", "copy", recursive=True),
            lambda: fs.rm("r", recursive=True),
            lambda: list(fs.walk("r")),
            lambda: fs.glob("r/**/f*"),
            lambda: fs.find("r", withdirs=True),
            lambda: fs.find("r", maxdepth=2),
            lambda: fs.isdir("r/s1"),
            lambda: fs.isfile("r/s1"),
        ):
            with pytest.raises(OSError, match="two members are missing") as refused:
                work()
            assert refused.value.errno == errno.EHOSTDOWN
        errors_of: list[OSError] = []
        roots = ["r", "r/s0", "r/s1", "r/s2"]
        assert [root for root, _, _ in fs.walk("r", on_error="omit")] == roots
        assert [root for root, _, _ in fs.walk("r", on_error=errors_of.append)] == roots
        assert [error.errno for error in errors_of] == [errno.EHOSTDOWN]
        with pytest.raises(OSError, match="two members are missing"):
            list(fs.walk("r", on_error="raise"))
    assert fs.cat(fs.find("")) == everything
    walk = fs.walk("r")
    assert next(walk)[0] == "r"
    fs.rm("r/s1", recursive=True)  # another client removes it meanwhile
    assert [files for _, _, files in walk] == [["f0", "f1"], [], ["f0", "f1"]]
    assert not fs.isdir("r/s1")


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (NotFound, errno.ENOENT), (AlreadyExists, errno.EEXIST), (NoSpace, errno.ENOSPC), (Refused, errno.EACCES),
        (Unavailable, errno.EHOSTDOWN), (Changed, errno.ESTALE), (StoreError, errno.EIO),
    ],
)  # fmt: skip
def test_errors_have_the_numbers_of_the_system(error: type[StoreError], number: int) -> None:
    def fail() -> None:
        raise error("why")

    with pytest.raises(OSError, match="why") as caught:
        call_with_os_errors("a/b", fail)
    assert (caught.value.errno, caught.value.filename) == (number, "a/b")
    assert type(caught.value) is type(OSError(number, "why"))


@pytest.mark.parametrize("way", ["pipe", "transaction", "write"])
def test_a_large_write_is_stored_in_usual_stripes(filesystem: CkptFileSystem, way: str) -> None:
    """Each append has a deadline: a write of gigabytes in one append would fail on a slow network."""
    data = random_bytes(20_000_000)
    if way == "write":
        with filesystem.open("large", "wb") as file:
            file.write(b"1")
            file.write(data)
    elif way == "pipe":
        filesystem.pipe("large", b"1" + data)
    else:
        with filesystem.transaction:
            filesystem.pipe("large", b"1" + data)
    layout = filesystem.namespace.stat("large").layout
    assert layout is not None
    assert max(stripe.nbytes for stripe in layout.stripes) <= 8 << 20
    assert filesystem.cat("large") == b"1" + data
