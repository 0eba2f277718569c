"""A reader that is written from the page on the format reads what ckpt saves, and finds each changed byte."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.drifting_states import drifting_state
from helpers.page_reader import Damaged, Step, history
from helpers.rank_threads import on_ranks

import ckpt
from ckpt.groups.threads import ThreadGroup


class Point(NamedTuple):
    x: np.ndarray
    y: int


@dataclasses.dataclass
class Settings:
    rate: float
    weight: np.ndarray


def same(read: Any, saved: Any) -> None:
    """Fail if a value differs from the saved one in type or bits; torch tensors are read as arrays, objects as dicts."""
    if isinstance(saved, torch.Tensor):
        saved = saved.detach().view(torch.uint8 if saved.dtype == torch.bfloat16 else saved.dtype).numpy()
        read = read.view(saved.dtype)
    if hasattr(saved, "state_dict"):
        saved = saved.state_dict()
    if isinstance(saved, Point):
        saved = saved._asdict()
    if dataclasses.is_dataclass(saved):
        saved = vars(saved)
    if isinstance(saved, (np.ndarray, np.generic)):
        assert (read.dtype, read.shape, read.tobytes()) == (saved.dtype, saved.shape, saved.tobytes())
    elif isinstance(saved, dict):
        assert list(read) == list(saved)
        for key in saved:
            same(read[key], saved[key])
    elif isinstance(saved, (list, tuple)):
        assert type(read) is type(saved)
        for one, other in zip(read, saved, strict=True):
            same(one, other)
    else:
        assert type(read) is type(saved)
        assert read == saved or (read != read and saved != saved)


def large(dtype: Any, count: int) -> np.ndarray:
    return (0.02 * np.random.default_rng(count).standard_normal(count)).astype(dtype)


def every_value() -> dict[str, Any]:
    """Return a state with every kind of node that a program without a framework can save, and many types of elements."""
    names = ["float8_e4m3fn", "bfloat16", "int4"]
    return {
        "small": {name: np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name)) for name in names},
        "numbers": [None, True, -3, 1.5, 1e300, float("nan"), float("-inf"), 2**70, -(2**70), 1 + 2j],
        "text": ["text ü", b"bytes", bytearray(b"x")],
        "arrays": [np.arange(7).astype(kind) for kind in ("bool", "u1", "i2", "u8", "f2", "f8", "c8", "c16", ">f4", "g")],
        "others": (np.array(["a", "bcd"]), np.array(["2026-01-01"], "M8[s]"), np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,))])),
        "empty": [np.zeros((0, 3)), np.array(5.0), {}, [], ()],
        "scalars": [np.float32(0.1), np.int64(-5), ml_dtypes.bfloat16(0.5)],
        "sets": [{1, 2}, frozenset({"a"})],
        "objects": [Point(np.ones(3), 4), Settings(0.1, np.zeros(2, "f4")), OrderedDict(a=1, b=2)],
        "long": [b"b" * 100_000, bytearray(b"c" * 100_000)],
        "large": large("f4", 3_000_000),
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"codec": "none"}, {"codec": {"id": "zstd", "level": 3}}]
    + [{"codec": {"id": name}} for name in ("float_planes", "blosc", "lz4", "zlib", "gzip", "bz2", "lzma")]
    + [{"digest": "blake3"}, {"digest": "blake3", "codec": {"id": "float_planes"}}],
    ids=str,
)  # fmt: skip
def test_the_reader_reads_every_value(tmp_path: Path, options: dict[str, Any]) -> None:
    state = every_value()
    if any(name in str(options) for name in ("zlib", "gzip", "bz2", "lzma")):  # slow codecs
        state["large"] = large("f4", 100_000)
    ckpt.save(state, tmp_path, step=7, **options)
    step = Step(tmp_path, 7)
    same(step.state(), state)
    used = {row["codec"] is not None for rows in step.rows.values() for row in rows}
    assert used >= {"codec" in options and options["codec"] != "none"}


def test_the_reader_reads_models_and_tied_arrays_of_torch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(9)).float().square().mean().backward()
    optimizer.step()
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, step=1)
    read = Step(tmp_path, 1).state()
    same(read, {"model": model, "optimizer": optimizer})
    assert read["model"]["0.weight"] is read["model"]["1.weight"]


def test_the_reader_reads_differences(tmp_path: Path) -> None:
    for number in range(3):
        ckpt.save(drifting_state(number), tmp_path, step=number, full_every=10, codec={"id": "float_planes"})
    for number in range(3):
        step = Step(tmp_path, number)
        same(step.state(), drifting_state(number))
        assert step.has_differences == (number > 0)


def test_the_reader_reads_a_step_of_several_ranks(tmp_path: Path) -> None:
    whole = np.arange(4 * 1000.0).reshape(4, 1000)

    def save(group: Any) -> None:
        part = ckpt.Shard(whole[2 * group.rank :][:2], (4, 1000), (2 * group.rank, 0))
        own = ckpt.PerRank({"rank": group.rank, "a": np.full(3, group.rank)})
        state = {"part": part, "common": large("f4", 3_000_000), "own": own}
        ckpt.save(state, tmp_path, step=1, group=group)

    on_ranks(2, save, ThreadGroup.make(2))
    step = Step(tmp_path, 1)
    assert step.commit["world_size"] == 2
    for rank in range(3):
        own = {"rank": rank % 2, "a": np.full(3, rank % 2)}
        same(step.state(rank), {"part": whole, "common": large("f4", 3_000_000), "own": own})


def test_the_reader_finds_the_newest_step_and_what_a_roll_back_has_left(tmp_path: Path) -> None:
    state = {"w": np.zeros(10)}
    with ckpt.Checkpointer(tmp_path) as ck:
        for number in (10, 20, 30):
            ck.save(number, state)
    with ckpt.Checkpointer(tmp_path) as ck:
        ck.restore(state, step=20)
        ck.save(25, state)
    assert history(tmp_path) == {10: "", 20: "", 30: "abandoned", 25: ""}
    with pytest.warns(UserWarning, match="the old steps are set aside"), ckpt.Checkpointer(tmp_path) as ck:
        ck.save(1, state)
    assert history(tmp_path) == {10: "set aside", 20: "set aside", 30: "set aside", 25: "set aside", 1: ""}


def test_the_reader_checks_the_signature(tmp_path: Path) -> None:
    key = bytes(range(32))
    (tmp_path / "key").write_text(key.hex() + "\n")
    ckpt.save({"w": np.arange(1000)}, tmp_path / "run", step=1, key=str(tmp_path / "key"))
    same(Step(tmp_path / "run", 1, key).state(), {"w": np.arange(1000)})
    with pytest.raises(Damaged, match="another key"):
        Step(tmp_path / "run", 1, bytes(32))


def test_the_reader_finds_a_changed_byte_of_each_file(tmp_path: Path) -> None:
    """So the digests of the page cover all that the step consists of."""
    ckpt.save({"w": np.arange(5000.0), "v": 3}, tmp_path, step=1, codec="none")
    files = sorted(file for file in (tmp_path / "steps/1").rglob("*") if file.is_file())
    assert len(files) == 4
    for file in files:
        good = file.read_bytes()
        for at in (0, len(good) // 3, 2 * len(good) // 3):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises((Damaged, UnicodeDecodeError, KeyError)):
                Step(tmp_path, 1).state()
        file.write_bytes(good)
    Step(tmp_path, 1).state()
