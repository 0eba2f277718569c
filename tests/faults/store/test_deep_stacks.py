"""Saves and loads from deep in the stack: a RecursionError counts neither as damage nor as a fault of a framework."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.folders import PROGRAMS

import ckpt
from ckpt.aggregator.records.file_record import FileRecord, RecordHead, decode_record, encode_record
from ckpt.format import codec
from ckpt.state.dtype_names import numpy_dtype
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.member import bucket_format
from ckpt.storage.registers.base import Register


@pytest.mark.parametrize("levels", [1, 60, 150])
@pytest.mark.parametrize("with_like", [False, True])
def test_a_load_from_deep_in_the_stack_does_not_fall_back_to_an_older_step(
    tmp_path: Path, levels: int, with_like: bool
) -> None:
    """In a process of its own, because an import without frames may leave other packages half imported."""
    command = [sys.executable, str(PROGRAMS / "deep_loads.py"), str(tmp_path / "r"), str(levels), str(with_like)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    outcomes = set(json.loads(done.stdout))
    assert {"1", "low stack"} <= outcomes <= {"1", "low stack", "nested", "stack"}
    assert ckpt.open(tmp_path / "r").steps() == [0, 1], "a step counts as damaged"


def test_a_save_from_deep_in_the_stack_makes_no_framework_unusable(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import sys
from pathlib import Path
import ckpt
ckpt.save({"w": 1}, Path(sys.argv[1], "first"), step=0)  # imports all else that a save needs
import torch

def save_below(frames):
    if frames:
        save_below(frames - 1)
    else:
        ckpt.save({"w": torch.ones(3)}, Path(sys.argv[1], "deep"), step=0, overwrite=True)

failed = 0
for frames in range(sys.getrecursionlimit(), 0, -1):
    try:
        save_below(frames)
    except (RecursionError, ckpt.UnsupportedLeaf):
        failed += 1
    else:
        break
assert failed > 5, failed
ckpt.save({"w": torch.ones(3)}, Path(sys.argv[1], "run"), step=0)
assert ckpt.load(Path(sys.argv[1], "run"))["w"].tolist() == [1, 1, 1]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_json_is_decoded_from_deep_in_the_stack() -> None:
    def decode_below(frames: int) -> Any:
        return parse_json(text) if frames == 0 else decode_below(frames - 1)

    text = "[" * 300 + "]" * 300
    used, frame = 0, sys._getframe()
    while frame.f_back is not None:
        used, frame = used + 1, frame.f_back
    value, depth = decode_below(sys.getrecursionlimit() - used - 200), 0
    while value:
        depth, value = depth + 1, value[0]
    assert depth == 299


def test_json_that_no_stack_can_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 1_000_000)


_RECORD = encode_record(FileRecord(RecordHead("file", 3, 1.0, 2.0, "v"), inline_data=b"abc"))
_STORED = bucket_format.encode_register("a", Register(value=_RECORD))
DECODERS: dict[str, Callable[[], object]] = {
    "codec": lambda: codec.encode('{"id": "zlib", "level": 1}', np.zeros(64, np.uint8), 1),
    "element type": lambda: numpy_dtype('numpy:[["a", "<i4"], ["b", "<f8", [2]]]'),
    "record of a path": lambda: decode_record("a", _RECORD),
    "record in a bucket": lambda: require_whole(bucket_format.decode_register(_STORED)[1]),
}


def require_whole(answer: object) -> None:
    assert isinstance(answer, Register)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_lacks_frames_finds_no_damage(name: str) -> None:
    def call_below(frames: int) -> None:
        if frames:
            call_below(frames - 1)
        else:
            DECODERS[name]()

    DECODERS[name]()
    outcomes = []
    for frames in range(sys.getrecursionlimit(), 0, -1):
        try:
            call_below(frames)
        except RecursionError:
            outcomes.append("no frames")
        else:
            break
    assert len(outcomes) > 10
