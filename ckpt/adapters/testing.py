"""The contracts of a framework as test suites: its arrays, and a training run that is killed and resumes.

The author of support for another framework checks it with a few lines:

    class TestMyArrays(ArrayContract):
        dtypes = ("float32", "bfloat16", "int64")
        fills_in_place = True

        def array(self, values):
            return my.tensor(values)

        def values(self, array):
            return my.to_numpy(array)

    class TestMyTraining(ResumeContract):
        program = Path("train.py")         # python train.py URL LOG: one line for each step in LOG

pytest collects the tests of these classes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import ckpt
from ckpt.dtypes import numpy_dtype as numpy_dtype

_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (2, 3, 5), (4, 0, 2))
_LARGE = (3 << 20) + 1
"""Elements of an array that takes several blocks in every type."""


def sample_values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    """Return pseudo-random values, which differ for every seed."""
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return np.asarray(generator.integers(0, 2, shape), np.bool_)
    return np.asarray(generator.integers(0, 100, shape)).astype(numpy_dtype(dtype))


def require_equal(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Fail unless two arrays have equal types, shapes and bytes; so NaN equals itself."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


class ArrayContract(ABC):
    """What holds for the arrays of every framework."""

    dtypes: ClassVar[Sequence[str]]
    """The names of the types that the framework has and numpy or ml_dtypes has, too."""
    fills_in_place: ClassVar[bool]
    """Whether a load with `like` writes to the arrays of `like`. Immutable arrays are replaced by new ones."""

    @abstractmethod
    def array(self, values: npt.NDArray[Any]) -> Any:
        """Return a new array of the framework with these values. It does not share memory with `values`."""

    @abstractmethod
    def values(self, array: Any) -> npt.NDArray[Any]:
        """Return the values of an array of the framework."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run the tests that have an argument `dtype` once for each type."""
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)

    def test_an_array_is_loaded_as_it_was_saved(self, tmp_path: Path, dtype: str) -> None:
        saved = {str(shape): sample_values(dtype, shape, len(shape)) for shape in _SHAPES}
        ckpt.save({name: self.array(values) for name, values in saved.items()}, tmp_path, 1)
        loaded = ckpt.load(tmp_path)
        for name, values in saved.items():
            assert type(loaded[name]) is type(self.array(values)), name
            require_equal(self.values(loaded[name]), values)

    def test_a_load_fills_the_arrays_of_like(self, tmp_path: Path, dtype: str) -> None:
        saved = {str(shape): sample_values(dtype, shape, 1) for shape in _SHAPES}
        ckpt.save({name: self.array(values) for name, values in saved.items()}, tmp_path, 1)
        like = {name: self.array(sample_values(dtype, values.shape, 2)) for name, values in saved.items()}
        before = dict(like)
        loaded = ckpt.load(tmp_path, like)
        for name, values in saved.items():
            assert (loaded[name] is before[name]) == self.fills_in_place or values.size == 0, name
            require_equal(self.values(loaded[name]), values)

    def test_numpy_and_the_framework_exchange_arrays(self, tmp_path: Path, dtype: str) -> None:
        values = sample_values(dtype, (5, 3))
        ckpt.save({"x": self.array(values)}, tmp_path, 1)
        require_equal(ckpt.load(tmp_path, {"x": np.empty_like(values)})["x"], values)
        ckpt.save({"x": values}, tmp_path, 2)
        require_equal(self.values(ckpt.load(tmp_path, {"x": self.array(np.zeros_like(values))})["x"]), values)

    def test_an_array_of_several_blocks_is_loaded(self, tmp_path: Path) -> None:
        values = sample_values(self.dtypes[0], (_LARGE,))
        ckpt.save({"x": self.array(values)}, tmp_path, 1)
        require_equal(self.values(ckpt.load(tmp_path)["x"]), values)

    def test_the_bits_of_nan_stay(self, tmp_path: Path) -> None:
        values = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x7F800001], np.uint32).view(np.float32)
        ckpt.save({"x": self.array(values)}, tmp_path, 1)
        require_equal(self.values(ckpt.load(tmp_path)["x"]), values)

    def test_one_array_in_two_places_is_stored_once(self, tmp_path: Path) -> None:
        array = self.array(sample_values(self.dtypes[0], (6,)))
        ckpt.save({"a": array, "b": array}, tmp_path, 1)
        assert len(ckpt.open(tmp_path)[1].leaves()) == 1
        loaded = ckpt.load(tmp_path)
        assert loaded["a"] is loaded["b"]

    @pytest.mark.parametrize("shape", [(4, 2), (8, 3), (6,)])
    def test_an_array_of_another_shape_is_refused_and_nothing_is_changed(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        ckpt.save(
            {"a": self.array(sample_values(self.dtypes[0], (3,))), "x": self.array(sample_values(self.dtypes[0], (8, 2)))},
            tmp_path,
            1,
        )
        present = sample_values(self.dtypes[0], (3,), 5), sample_values(self.dtypes[0], shape, 6)
        like = {"a": self.array(present[0]), "x": self.array(present[1])}
        with pytest.raises(ckpt.LeafMismatch, match="x"):
            ckpt.load(tmp_path, like)
        require_equal(self.values(like["a"]), present[0])
        require_equal(self.values(like["x"]), present[1])

    def test_a_missing_array_is_refused_by_name(self, tmp_path: Path) -> None:
        array = self.array(sample_values(self.dtypes[0], (3,)))
        ckpt.save({"a": array}, tmp_path, 1)
        with pytest.raises(ckpt.CkptError, match="weight"):
            ckpt.load(tmp_path, {"a": array, "weight": self.array(sample_values(self.dtypes[0], (3,)))})

    def test_a_save_in_the_background_has_the_values_of_its_call(self, tmp_path: Path) -> None:
        values = sample_values(self.dtypes[0], (_LARGE,))
        state = {"x": self.array(values)}
        handle = ckpt.save(state, tmp_path / "saved", 1, blocking=False)
        if self.fills_in_place:  # the next training step changes the array
            ckpt.save({"x": np.zeros_like(values)}, tmp_path / "zeros", 1)
            ckpt.load(tmp_path / "zeros", state)
        handle.wait()
        require_equal(self.values(ckpt.load(tmp_path / "saved")["x"]), values)


class ResumeContract(ABC):
    """A training run that is killed in the middle resumes, and each of its losses equals that of the undisturbed run."""

    program: ClassVar[Path]
    """A script that is called with a URL and a log file. It resumes from the URL, and after each step it appends a line to the
    log: the number of the step, a space, and the loss with all its bits (such as `float.hex`). It makes at least 20 steps."""
    arguments: ClassVar[Sequence[str]] = ()
    """Further arguments of the script."""
    kill_after: ClassVar[Sequence[int]] = (7, 13)
    """The script is killed by SIGKILL when it has logged this step; once for each number, in one training run."""
    timeout_seconds: ClassVar[float] = 300
    """How long one run of the script may take."""

    def test_a_killed_training_has_the_losses_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        undisturbed = self._run(tmp_path / "a", None)
        for step in self.kill_after:
            self._run(tmp_path / "b", step)
        self._run(tmp_path / "b", None)
        expected, found = _losses(undisturbed), _lines(tmp_path / "b.log")
        assert len(expected) >= 20, "the script makes fewer than 20 steps"
        assert {step for step, _ in found} == set(expected)
        assert [(step, loss) for step, loss in found if expected[step] != loss] == []
        starts = [step for (before, _), (step, _) in zip(found, found[1:], strict=False) if step != before + 1]
        assert any(start > 0 for start in starts), f"it never resumed, it began again at the first step: {starts}"

    def _run(self, folder: Path, kill_after: int | None) -> Path:
        """Run the script, up to its end or until a step is logged; return the log."""
        log, output = folder.with_suffix(".log"), folder.with_suffix(".txt")
        command = [sys.executable, str(self.program), str(folder), str(log), *self.arguments]
        with output.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                deadline = time.monotonic() + self.timeout_seconds
                while process.poll() is None:
                    assert time.monotonic() < deadline, f"no end after {self.timeout_seconds} s: {output.read_text()}"
                    if kill_after is not None and any(step >= kill_after for step, _ in _lines(log)):
                        break
                    time.sleep(0.01)
            finally:
                process.kill()
                process.wait()
        if kill_after is None:
            assert process.returncode == 0, output.read_text()
        else:
            assert process.returncode == -9, f"it ended before step {kill_after}: {output.read_text()}"
        return log


def _lines(log: Path) -> list[tuple[int, str]]:
    """Return step and loss of each complete line of a log."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(int(step), loss) for step, loss in lines]


def _losses(log: Path) -> dict[int, str]:
    return dict(_lines(log))
