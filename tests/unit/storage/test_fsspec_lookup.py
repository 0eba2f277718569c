"""File systems of fsspec that report too little: links that are not followed, and listings that failed."""

from __future__ import annotations

import ftplib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.ftp import FTPFileSystem

from ckpt.storage.base.errors import NotFound, StoreError, Unavailable
from ckpt.storage.remote.fsspec_store import FsspecStore
from ckpt.storage.testing import object_lengths


def test_a_listing_of_fsspec_follows_links(tmp_path: Path) -> None:
    """As in SFTP, `ls` does not follow links, and `info` does."""
    store = FsspecStore(f"local://{tmp_path}/store")
    for name in ("steps/1/x", "steps/2/x", "steps/3/x"):
        store.put(name, b"123")
    for moved in ("1", "3/x"):
        target = tmp_path / f"disk{moved[0]}"
        (tmp_path / "store/steps" / moved).rename(target)
        (tmp_path / "store/steps" / moved).symlink_to(target)
    assert object_lengths(store) == {"steps/1/x": 3, "steps/2/x": 3, "steps/3/x": 3}
    assert sorted(store.list_folders("steps")) == ["1", "2", "3"]


def test_a_link_of_fsspec_to_nothing_makes_a_listing_fail(tmp_path: Path) -> None:
    store = FsspecStore(f"local://{tmp_path}/store")
    store.put("steps/2/x", b"123")
    (tmp_path / "store/steps/1").symlink_to(tmp_path / "away")
    with pytest.raises(StoreError, match="steps/1 in .* is a link to nothing"):
        list(store.list())
    assert sorted(store.list_folders("steps")) == ["1", "2"]
    store.sweep_temporaries("steps")


class FtpConnection:
    """A connection to an FTP server that has the files of a folder, and can't list the folders `failing`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.failing: dict[str, ftplib.Error] = {}

    def mlsd(self, path: str) -> Iterator[tuple[str, dict[str, str]]]:
        folder = self._root / path.lstrip("/")
        if error := self.failing.get(path, None if folder.is_dir() else ftplib.error_perm("550 no such folder")):
            raise error
        for each in folder.iterdir():
            yield each.name, {"type": "dir" if each.is_dir() else "file", "size": str(each.stat().st_size)}

    def dir(self, path: str, *_: object) -> None:
        raise self.failing.get(path, ftplib.error_perm("550 no such folder"))

    def close(self) -> None:
        pass


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FtpConnection:
    found = FtpConnection(tmp_path)
    monkeypatch.setattr(FTPFileSystem, "_connect", lambda self: setattr(self, "ftp", found))
    for step in ("1", "2"):
        (tmp_path / "run/steps" / step).mkdir(parents=True)
        (tmp_path / "run/steps" / step / "x").write_bytes(b"123")
    (tmp_path / "run/empty").mkdir()
    return found


def test_an_ftp_server_that_lists_everything_has_files_and_missing_ones(connection: FtpConnection) -> None:
    store = FsspecStore("ftp://host/run")
    assert object_lengths(store) == {"steps/1/x": 3, "steps/2/x": 3}
    assert sorted(store.list_folders("steps")) == ["1", "2"]
    for folder in ("empty", "lines", "lines/old", "steps/1/x"):
        assert [*store.list(folder), *store.list_folders(folder)] == []
    for name in ("lines", "steps/1/y", "steps/3/x", "steps/1", "lines/old/x"):
        with pytest.raises(NotFound):
            store.get(name)


@pytest.mark.parametrize("error", [ftplib.error_temp("425 can't open data connection"), ftplib.error_perm("550 denied")])
@pytest.mark.parametrize(
    ("failing", "folder", "name"),
    [
        (["/run/steps/2"], "steps/2", "steps/2/x"),
        (["/run/steps"], "steps", "steps/2"),
        (["/run"], "", "steps"),
        (["/", "/run", "/run/steps", "/run/steps/2"], "steps", "steps/2/x"),
    ],
)
def test_a_folder_that_an_ftp_server_does_not_list_is_not_empty(
    connection: FtpConnection, failing: list[str], folder: str, name: str, error: ftplib.Error
) -> None:
    connection.failing = dict.fromkeys(failing, error)
    store = FsspecStore("ftp://host/run")
    for call in (
        lambda: list(store.list()),
        lambda: list(store.list_folders(folder)),
        lambda: store.exists(name),
        lambda: store.put_new(name, b"1"),
    ):
        with pytest.raises(Unavailable, match="the server does not list /"):
            call()
