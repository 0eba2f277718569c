"""fsspec with files and folders at the root of a namespace."""

from __future__ import annotations

from pathlib import Path

from helpers.filesystems import address as address
from helpers.filesystems import filesystem as filesystem

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem


def test_a_path_that_ends_with_a_slash_is_a_folder_also_for_files_at_the_root(
    filesystem: CkptFileSystem, tmp_path: Path
) -> None:
    fs = filesystem
    fs.pipe({"a": b"1", "run/x": b"2", "b1": b"3"})
    for source in ("a", "/a", fs.unstrip_protocol("a"), "[a]*"):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        fs.get(source, f"{out}/")
        assert [path.name for path in out.iterdir()] == ["a"]
    fs.get("run", f"{tmp_path}/whole/", recursive=True)
    assert (tmp_path / "whole/run/x").read_bytes() == b"2"
    fs.get("run/", f"{tmp_path}/below/", recursive=True)
    assert (tmp_path / "below/x").read_bytes() == b"2"
    fs.get("a", f"{tmp_path}/renamed")
    assert (tmp_path / "renamed").read_bytes() == b"1"
    fs.cp("a", "c1/")
    fs.cp("run", "c2/", recursive=True)
    fs.mv("b*", "c3/")
    assert fs.find("") == ["a", "c1/a", "c2/run/x", "c3/b1", "run/x"]
