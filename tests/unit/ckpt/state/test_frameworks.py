"""Each framework has one file for its leaves, found by the type of a value, and none is imported for it."""

from __future__ import annotations

import ast
import os
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


UNUSABLE = """
import sys, numpy, warnings, ckpt
import keras, paddle, torch
sys.modules["tensorflow"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = {"a": numpy.arange(3), "random": ckpt.RandomState(), "layer": keras.Layer()}
    for step in (1, 2):
        ckpt.save(state, sys.argv[1], step)
    state["layer"].units = 0
    ckpt.load(sys.argv[1], like=state)
assert state["layer"].units == 7
print(*sorted(str(warning.message).partition(" (")[0] for warning in caught), sep="\\n")
"""


@pytest.mark.slow
def test_packages_that_only_share_the_name_of_a_framework_break_no_save(tmp_path: Path) -> None:
    """A package of the user named keras, an empty torch, a paddle whose import has left a part of it, no tensorflow at all."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "paddle.py").write_text("import sys\nsys.modules['paddle.base'] = None\n")
    (tmp_path / "keras.py").write_text(
        "class Layer:\n    units = 7\n    def state_dict(self): return {'units': self.units}\n"
        "    def load_state_dict(self, state): self.units = state['units']\n"
    )
    command = [sys.executable, "-c", UNUSABLE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    expected = [f"the imported package {name} cannot be used" for name in ("keras", "paddle", "torch")]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.slow
def test_random_generators_of_an_imported_framework_start_nothing() -> None:
    """jax makes no client of a device, and torch starts no CUDA: both would take seconds and memory of the accelerator."""
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    code = (
        "import ckpt, jax, torch; ckpt.RandomState().load_state_dict(ckpt.RandomState().state_dict()); "
        "print(jax._src.xla_bridge.backends_are_initialized(), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr
