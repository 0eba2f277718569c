"""Libraries that split a URL into protocol and path, and build URLs from both again: the namespace survives that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.generic import rsync
from helpers.nodes import three_nodes

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem

FILES = {
    "run/a.json": b'{"x": 1}\n{"x": 2}\n', "run/d/b c.txt": b"22", "run/d/ü#+.txt": b"33", "run/d/100%25.txt": b"4",
    "run/w?.txt": b"5",
}  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


@pytest.fixture(scope="module", params=["addresses", "name"])
def names(request: pytest.FixtureRequest, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return each form of the part of a URL between ckpt:// and the path."""
    config = tmp_path_factory.mktemp("config") / "config.toml"
    members = ", ".join(f'"{each}"' for each in address.split(","))
    config.write_text(f"[namespaces.lab]\nmembers = [{members}]\n")
    before = os.environ.get("CKPT_CONFIG")
    os.environ["CKPT_CONFIG"] = str(config)
    yield address if request.param == "addresses" else "lab"
    if before is None:
        del os.environ["CKPT_CONFIG"]
    else:
        os.environ["CKPT_CONFIG"] = before


@pytest.fixture
def files(names: str) -> Iterator[CkptFileSystem]:
    found: CkptFileSystem = fsspec.filesystem("ckpt", members=names)
    for path, content in FILES.items():
        found.pipe(path, content)
    yield found
    found.rm(found.ls("", detail=False), recursive=True)


def test_each_path_can_be_made_a_url_again(names: str, files: CkptFileSystem) -> None:
    url = f"ckpt://{names}/run"
    fs, path = fsspec.core.url_to_fs(url)
    assert fs is files
    for found in (*fs.find(path), *fs.glob(f"{path}/d/*"), *fs.ls(path, detail=False), fs.info(path)["name"]):
        again, inner = fsspec.core.url_to_fs(f"ckpt://{found}")
        assert again is files
        assert inner == found
        assert fs.exists(found)
    assert {fs.resolve(found).path: fs.cat_file(found) for found in fs.find(path)} == FILES
    assert fs._parent(fs._strip_protocol(f"{url}/d")) == path


def test_paths_in_a_namespace_are_plain_paths(names: str, files: CkptFileSystem) -> None:
    assert sorted(files.find("run")) == sorted(FILES)
    assert files.ls("run/d", detail=False) == sorted(p for p in FILES if p.startswith("run/d/"))
    assert files.glob("run/*.json") == ["run/a.json"]
    assert files.cat_file("run/a.json") == FILES["run/a.json"]
    files.pipe("12:30/lab/x", b"a folder that looks like an address, and one that looks like a name")
    assert files.find("12:30") == ["12:30/lab/x"]
    assert files.cat_file(f"ckpt://{names}/12:30/lab/x") == files.cat_file("12:30/lab/x")


def test_a_filesystem_without_members_has_paths_with_their_namespace(names: str, files: CkptFileSystem) -> None:
    fs = fsspec.filesystem("ckpt")
    url = f"ckpt://{names}/run/a.json"
    assert fs.cat_file(url) == fs.cat_file(fs._strip_protocol(url)) == FILES["run/a.json"]
    with fs.open(f"ckpt://{names}/new/b", "wb") as file:
        file.write(b"1" * 100_000)
    fs.mv(f"ckpt://{names}/new/b", f"ckpt://{names}/new/c")
    fs.copy(f"ckpt://{names}/new/c", f"ckpt://{names}/new/d")
    fs.rm(f"ckpt://{names}/new/c")
    assert files.find("new") == ["new/d"]
    for path in ("run/a.json", "", "lab/run/a.json"):
        with pytest.raises(ValueError, match="names no namespace"):
            fs.info(path)


def test_fsspec_rsync_copies_a_folder(names: str, files: CkptFileSystem, tmp_path: Path) -> None:
    rsync(f"ckpt://{names}/run", f"file://{tmp_path}/out")
    assert (tmp_path / "out" / "d" / "b c.txt").read_bytes() == b"22"
    assert (tmp_path / "out" / "d" / "ü#+.txt").read_bytes() == b"33"
    rsync(f"file://{tmp_path}/out", f"ckpt://{names}/back")
    rsync(f"ckpt://{names}/back", f"ckpt://{names}/copy")
    for folder in ("back", "copy"):
        assert {f"run{path[len(folder) :]}": files.cat_file(path) for path in files.find(folder)} == FILES


def test_upath_reads_and_writes(names: str, files: CkptFileSystem) -> None:
    upath: Any = pytest.importorskip("upath")
    path = upath.UPath(f"ckpt://{names}/run")
    file = upath.UPath(str(path / "a.json"))
    assert file.read_bytes() == FILES["run/a.json"]
    assert (file.name, str(file.parent)) == ("a.json", str(path))
    found = {files.resolve(str(each)).path: upath.UPath(str(each)).read_bytes() for each in path.rglob("*.txt")}
    assert found == {p: content for p, content in FILES.items() if p.endswith(".txt")}
    (path / "new.txt").write_text("new")
    assert files.cat_file("run/new.txt") == b"new"


def test_datasets_loads_files(names: str, files: CkptFileSystem, tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    options = {"split": "train", "cache_dir": str(tmp_path)}
    for data_files in (f"ckpt://{names}/run/a.json", f"ckpt://{names}/run/*.json"):
        loaded = datasets.load_dataset("json", data_files=data_files, **options)
        assert list(loaded["x"]) == [1, 2]
        assert [row["x"] for row in datasets.load_dataset("json", data_files=data_files, streaming=True, **options)] == [1, 2]
