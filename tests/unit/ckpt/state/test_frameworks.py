"""Each framework has one file for its leaves, found by the type of a value, and none is imported for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.errors import FormatError
from ckpt.state import frameworks
from ckpt.state.frameworks import file_of_kind, framework_file

LEAVES = Path(frameworks.__file__).parent / "leaves"
FILES = sorted(set(frameworks._FILE_OF_PACKAGE.values()))


@pytest.mark.parametrize("name", FILES)
def test_each_framework_file_defines_what_a_save_and_a_load_call(name: str) -> None:
    tree = ast.parse((LEAVES / f"{name}.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"is_array", "as_leaf", "empty_leaf"} <= defined
    assert ("random_state" in defined) == ("set_random_state" in defined)


def test_a_type_is_found_by_its_bases() -> None:
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    assert framework_file(Mine) is framework_file(torch.Tensor) is file_of_kind("torch")
    assert framework_file(np.ndarray) is framework_file(dict) is None


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(FormatError, match="unknown array kind 'abacus'"):
        file_of_kind("abacus")


def test_no_framework_is_imported_by_a_save(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, ckpt; ckpt.save({'a': numpy.zeros(3), 'random': ckpt.RandomState()}, sys.argv[1], 1); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[2].split(','))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), ",".join(FILES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
    assert ckpt.open(tmp_path).steps() == [1]
