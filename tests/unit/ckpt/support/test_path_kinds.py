"""A path that can't be looked up now does not count as absent."""

from __future__ import annotations

import ast
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.folders import REPOSITORY

from ckpt.support.path_kinds import is_file, is_folder


def test_each_kind_of_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    assert is_folder(tmp_path)
    assert is_file(tmp_path / "file")
    assert is_file(str(tmp_path / "link"))
    for absent in ("none", "none/below", "file/below", "dangling", "zero\0byte"):
        assert not is_folder(tmp_path / absent)
        assert not is_file(tmp_path / absent)
    assert not is_folder(tmp_path / "file")
    assert not is_file(tmp_path)


@pytest.mark.parametrize("ask", [is_folder, is_file])
def test_an_error_of_the_file_system_is_raised(tmp_path: Path, ask: Callable[[Path], bool]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError) as failure:
        ask(tmp_path / "loop")
    assert failure.value.errno == errno.ELOOP


LENIENT = {"os.path.isdir", "os.path.isfile", "os.path.exists", "os.path.lexists"}
ALLOWED = {"other_package.py": "looks for files of another package on the import path"}


def lenient_checks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each call of os.path that means by False that something is absent, or any error."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func)) in LENIENT:
            yield call.lineno, name


def test_no_module_takes_an_error_for_no() -> None:
    assert list(lenient_checks(ast.parse("os.path.isdir(a)\nstore.exists(a)"))) == [(1, "os.path.isdir")]
    files = [path for path in (REPOSITORY / "ckpt").rglob("*.py") if path.name not in ALLOWED]
    assert len(files) > 200
    assert [(path.name, *check) for path in files for check in lenient_checks(ast.parse(path.read_text()))] == []
