"""ckpt-import reads files of paddle.save with the values of paddle.load, without Paddle, and runs nothing of them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.imports import assert_killed_import_leaves_no_step, growth_of_memory, load_imported
from helpers.refusal import refused

import ckpt
from ckpt.adapters.paddle import ModelState
from ckpt.storage.base.errors import CkptError
from ckpt.tools import import_paddle


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, paddle.Tensor):
        assert isinstance(found, paddle.Tensor)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert type(found) is type(expected)
        assert found == expected


def model_and_optimizer(rate: Any = 0.01) -> tuple[Any, Any]:
    paddle.seed(4)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.BatchNorm1D(8), paddle.nn.Linear(8, 2))
    return model, paddle.optimizer.AdamW(rate, parameters=model.parameters())


def train(model: Any, optimizer: Any, steps: range) -> list[bytes]:
    losses = []
    for step in steps:
        loss = model(paddle.to_tensor(np.random.default_rng(step).standard_normal((6, 4), np.float32))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if not isinstance(optimizer._learning_rate, float):
            optimizer._learning_rate.step()
        losses.append(loss.numpy().tobytes())
    return losses


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_values_are_those_of_paddle_load(tmp_path: Path, protocol: int) -> None:
    state = {
        "tensor": paddle.arange(12).reshape([3, 4]), "bf16": paddle.ones([3]).astype("bfloat16"),
        "scalar": paddle.to_tensor(2.5), "half": paddle.randn([2, 2]).astype("float16"),
        "bool": paddle.to_tensor([True, False]), "empty": paddle.zeros([0, 3]),
        "complex": paddle.ones([2]).astype("complex64"), "large": paddle.randn([300, 1000]),
        "plain": [1, 2.5, "text", None, True, (3, -(2**70))], "array": np.arange(6.0).reshape(2, 3), "number": np.float32(3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }  # fmt: skip
    for name, content in {
        "mixed": state,
        "layer": model_and_optimizer()[0].state_dict(),
        "arrays": {"a": np.arange(3)},
    }.items():
        path = tmp_path / name / f"{name}.pdparams"
        path.parent.mkdir()
        paddle.save(content, str(path), protocol=protocol)
        assert_same(load_imported(path), paddle.load(str(path)))
    paddle.save(state["tensor"], str(tmp_path / "one.pdtensor"), protocol=protocol)
    assert_same(load_imported(tmp_path / "one.pdtensor"), state["tensor"])


@pytest.mark.parametrize("scheduled", [False, True], ids=["fixed", "scheduled"])
def test_a_training_continues_from_an_imported_folder(tmp_path: Path, scheduled: bool) -> None:
    def rate() -> Any:
        return paddle.optimizer.lr.StepDecay(0.1, 2) if scheduled else 0.01

    model, optimizer = model_and_optimizer(rate())
    train(model, optimizer, range(3))
    paddle.save(model.state_dict(), str(tmp_path / "old" / "last.pdparams"))
    paddle.save(optimizer.state_dict(), str(tmp_path / "old" / "last.pdopt"))
    expected = train(model, optimizer, range(3, 6))
    load_imported(tmp_path / "old", "--step", 2)
    model, optimizer = model_and_optimizer(rate())
    ckpt.load(tmp_path / "imported", like=ModelState(model, optimizer))
    assert train(model, optimizer, range(3, 6)) == expected


def test_weights_fill_a_layer(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    paddle.save(model.state_dict(), str(tmp_path / "weights.pdparams"))
    load_imported(tmp_path / "weights.pdparams", "--under", "model")
    other = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.BatchNorm1D(8), paddle.nn.Linear(8, 2))
    ckpt.load(tmp_path / "imported", like={"model": other})
    assert_same(other.state_dict(), model.state_dict())


def test_parts_of_large_arrays_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol 3 has arrays of more than 1 GiB in parts; here the parts are made by hand, as of a smaller limit."""
    whole = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    parts = {f"w@@.{i}": whole.reshape(-1)[i * 12 : i * 12 + 12] for i in range(3)}
    entry = {"w": {"OriginShape": whole.shape, "slices": list(parts)}}
    state = {**parts, "UnpackBigParamInfor@@": entry, "StructuredToParameterName@@": {"w": "w_0"}}
    for protocol in (2, 3):
        path = tmp_path / f"{protocol}.pdparams"
        path.write_bytes(pickle.dumps(state, protocol))
        assert_same(load_imported(path), {"w": paddle.to_tensor(whole)})
        assert_same(load_imported(path), paddle.load(str(path)))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["CKPT_TEST_EVIL"],)


HOSTILE = {
    "posix.mkdir": None,
    "builtins.eval": b"\x80\x04cbuiltins\neval\n(\x8c\x08print(1)tR.",
    "a call": b"\x80\x04}K\x02\x85R.",
    "a dict with attributes": b"\x80\x04}}b.",
    "a int with items": b"\x80\x04K\x01K\x02a.",
    "an array of the type": b"\x80\x04cnumpy\ndtype\n\x8c\x02O8\x89\x88\x87R.",
    "damaged": b"\x80\x04\x95\x00\x01",
    "copy it again": b"\x80\x04(\x8c\x08os\nmkdir\x81.",
}
"""Pickles by the words of the message that refuses them; None for one that makes a folder."""


@pytest.mark.parametrize("words", HOSTILE)
def test_nothing_is_executed(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_EVIL", str(tmp_path / "evil"))
    (tmp_path / "bad.pdparams").write_bytes(HOSTILE[words] or pickle.dumps({"a": Evil()}))
    with refused(CkptError, words, "bad.pdparams"):
        load_imported(tmp_path / "bad.pdparams")
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "imported").exists()


def test_damaged_files_and_wrong_folders_are_refused(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(1))
    folder = tmp_path / "folder"
    paddle.save(optimizer.state_dict(), str(folder / "a.pdopt"))
    with refused(CkptError, "no .pdparams file"):
        load_imported(folder)
    other = paddle.nn.Linear(2, 2)
    paddle.save(other.state_dict(), str(folder / "a.pdparams"))
    with refused(CkptError, "belongs to no parameter"):
        load_imported(folder)
    paddle.save(other.state_dict(), str(folder / "b.pdparams"))
    with refused(CkptError, "several .pdparams files", "a.pdparams, b.pdparams"):
        load_imported(folder)
    whole = (folder / "a.pdopt").read_bytes()
    for length in range(0, len(whole) - 1, 7):
        (tmp_path / "short.pdopt").write_bytes(whole[:length])
        with refused(CkptError, "copy it again"):
            load_imported(tmp_path / "short.pdopt")
    assert not (tmp_path / "imported").exists()


def test_a_killed_import_leaves_no_step(tmp_path: Path) -> None:
    paddle.save({"a": paddle.randn([1000])}, str(tmp_path / "a.pdparams"))
    assert_killed_import_leaves_no_step(tmp_path / "a.pdparams")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """A small file first loads all modules; then 600 MB are imported with much less memory, and without Paddle."""
    small, big = tmp_path / "small.pdparams", tmp_path / "big.pdparams"
    for path, size in ((small, 1), (big, 1 << 26)):
        arrays = {"big": np.ones(size, np.float64), "small": np.arange(9.0)}
        with open(path, "wb") as file:
            pickle.dump({**arrays, import_paddle.NAMES: {name: name for name in arrays}}, file, protocol=4)
    assert growth_of_memory(small, big, tmp_path, absent="paddle") < 400 << 20
