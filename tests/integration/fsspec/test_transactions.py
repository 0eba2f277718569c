"""Transactions of fsspec on a namespace."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.filesystems import address as address
from helpers.filesystems import filesystem as filesystem

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem


def test_a_transaction_publishes_all_files_or_none(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    with fs.transaction, fs.open("a", "wb") as file:
        file.write(b"1" * 100_000)
    assert fs.cat("a") == b"1" * 100_000

    class Stop(Exception):
        pass

    with pytest.raises(Stop), fs.transaction:
        with fs.open("b", "wb") as file:
            file.write(b"1" * 100_000)
        raise Stop
    assert not fs.exists("b")


def test_a_rolled_back_transaction_leaves_no_file_of_any_call(filesystem: CkptFileSystem, tmp_path: Path) -> None:
    fs = filesystem
    (tmp_path / "local").write_bytes(b"new" * 50_000)
    fs.pipe({"kept": b"old", "source": b"s"})

    def write_with_each_call() -> None:
        fs.pipe("pipe", b"new")
        fs.pipe("large", b"new" * 50_000)
        fs.pipe("kept", b"new")
        fs.put(str(tmp_path / "local"), "put")
        fs.cp("source", "cp")
        fs.touch("touch")

    with pytest.raises(ArithmeticError), fs.transaction:
        write_with_each_call()
        assert fs.cat("kept") == b"old"  # nothing is visible before the end
        raise ArithmeticError
    assert fs.find("") == ["kept", "source"]
    assert fs.cat("kept") == b"old"
    with fs.transaction:
        write_with_each_call()
        assert fs.find("") == ["kept", "source"]
    assert fs.find("") == ["cp", "kept", "large", "pipe", "put", "source", "touch"]
    assert fs.cat(["kept", "large", "put"]) == {"kept": b"new", "large": b"new" * 50_000, "put": b"new" * 50_000}
