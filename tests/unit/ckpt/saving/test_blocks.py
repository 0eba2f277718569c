"""Blocks of a step: compressed, deduplicated, in packs that roll over."""

import errno
import json
import os

import numcodecs
import numpy as np
import pytest
import torch
from helpers.gated_store import MIB
from helpers.processes import finish, python
from helpers.states import assert_same

import ckpt
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.fd_io import DescriptorReader

CODECS = [
    "none", "auto", None, {"id": "zstd", "level": 3}, {"id": "blosc", "cname": "lz4", "shuffle": 2}, numcodecs.LZ4(),
    numcodecs.Zlib(), {"id": "gzip", "level": 1}, {"id": "bz2", "level": 1}, {"id": "lzma"},
    {"model.*": "none", "*.bf": {"id": "blosc", "cname": "zstd", "shuffle": 1}, "*": numcodecs.Zstd(1)},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_codec_restores_the_same_bytes(tmp_path, codec):
    rng = np.random.default_rng(0)
    state = {
        "model": {"w": rng.integers(0, 4, 500_000).astype(np.float32), "noise": rng.bytes(100_000)},
        "opt": {
            "m": np.zeros(3 * MIB, np.float32),
            "bf": torch.zeros(1000, 7, dtype=torch.bfloat16),
            "odd": np.ones(7, "S5"),
        },
    }
    checkpoint = ckpt.save(state, tmp_path / "r", codec=codec)
    loaded = ckpt.load(tmp_path / "r")
    np.testing.assert_array_equal(loaded["model"]["w"], state["model"]["w"])
    np.testing.assert_array_equal(loaded["opt"]["m"], state["opt"]["m"])
    assert torch.equal(loaded["opt"]["bf"], state["opt"]["bf"])
    assert loaded["model"]["noise"] == state["model"]["noise"]
    assert loaded["opt"]["odd"].tolist() == [b"1"] * 7
    by_name = {leaf.name: leaf for leaf in checkpoint.leaves()}
    compressed = {name for name, leaf in by_name.items() if leaf.codec}
    if codec in ("none", None):
        assert not compressed
    elif codec != "auto":
        assert "opt.m" in compressed
        assert by_name["opt.m"].stored_bytes < 0.1 * by_name["opt.m"].nbytes
        assert "model.noise" not in compressed  # it does not become smaller, so it is stored raw
    if isinstance(codec, dict) and "*" in codec:
        assert "model.w" not in compressed
        assert "blosc" in by_name["opt.bf"].codec
    assert checkpoint.verify() > 0


def test_unchanged_blocks_are_referenced(tmp_path):
    state = {"frozen": np.random.default_rng(0).random(2 * MIB), "head": np.zeros(MIB), "step": 0}
    first = ckpt.save(state, tmp_path / "r", step=0, codec="none")
    assert first.commit.written_bytes >= 24 * MIB
    state["head"] += 1
    state["step"] = 1
    second = ckpt.save(state, tmp_path / "r", step=1, codec="none")
    assert second.commit.written_bytes <= 9 * MIB
    assert {leaf.name: leaf.written_in for leaf in second.leaves()} == {"frozen": 0, "head": 1}
    third = ckpt.save(state, tmp_path / "r", step=2)
    assert third.commit.written_bytes == 0
    state["head"] += 1
    ckpt.save(state, tmp_path / "r", step=3, keep=1)  # deletes steps, but no pack that step 3 references
    assert ckpt.open(tmp_path / "r").steps() == [3]
    loaded = ckpt.load(tmp_path / "r")
    np.testing.assert_array_equal(loaded["frozen"], state["frozen"])
    np.testing.assert_array_equal(loaded["head"], state["head"])
    assert not list((tmp_path / "r/steps/1").glob("**/*.pack"))
    with ckpt.Checkpointer(
        tmp_path / "r", every=1, codec="none"
    ) as ck:  # within one session the digests are in memory and no block is read again
        assert ck.save(4, state, blocking=True).result().commit.written_bytes == 0
        state["head"] += 1
        assert 0 < ck.save(5, state, blocking=True).result().commit.written_bytes <= 9 * MIB
    assert ckpt.save(state, tmp_path / "r", step=6, digest="blake3", codec="none").commit.written_bytes >= 24 * MIB
    assert ckpt.open(tmp_path / "r")[6].verify() > 0


def test_a_missing_pack_is_not_referenced(tmp_path):
    state = {"a": np.random.default_rng(0).random(MIB)}
    ckpt.save(state, tmp_path / "r", codec="none")
    next((tmp_path / "r").glob("**/*.pack")).unlink()
    checkpoint = ckpt.save(state, tmp_path / "r", codec="none")
    assert checkpoint.commit.written_bytes >= 8 * MIB
    np.testing.assert_array_equal(ckpt.load(tmp_path / "r")["a"], state["a"])


SAVER = """
import json, sys, numpy as np, ckpt
for step in (0, 1):
    state = {"frozen": np.arange(6 << 20, dtype="u2"), "head": np.random.default_rng(step).integers(0, 9, 1 << 20, "u1")}
    ckpt.save(state, sys.argv[1], step=step, codec=json.loads(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", {"id": "zstd", "level": 1}])
@pytest.mark.parametrize("damage", ["first byte", "last byte", "bad sector"])
def test_a_rotten_block_is_not_referenced(tmp_path, caplog, monkeypatch, codec, damage):
    """Blocks of another process are read before their first reference; otherwise no whole step might be left."""
    finish(python(SAVER, tmp_path / "r", json.dumps(codec)))
    newest = ckpt.open(tmp_path / "r")[1]
    state = ckpt.load(tmp_path / "r", step=1)
    [bad] = [row for row in newest.manifest().by_block() if row.leaf == "head"]
    pack = tmp_path / "r" / bad.pack
    assert "steps/1/" in bad.pack
    if damage == "bad sector":

        def read_into(self, position, buffer, inner=DescriptorReader.read_into):
            if self._where.endswith(bad.pack):
                raise StoreError("reading failed") from OSError(errno.EIO, "Input/output error")
            return inner(self, position, buffer)

        monkeypatch.setattr(DescriptorReader, "read_into", read_into)
    else:
        data = bytearray(pack.read_bytes())
        data[bad.position + (0 if damage == "first byte" else bad.stored - 1)] ^= 1
        pack.write_bytes(data)
    saved = ckpt.save(state, tmp_path / "r", step=2, keep=1, codec="none")
    assert ckpt.open(tmp_path / "r").steps() == [2]
    assert saved.commit.written_bytes == MIB, "only the head is written: the other blocks are whole and referenced"
    assert f"{bad.pack}, block at byte {bad.position}, " in caplog.text
    assert "the block is written again, and no new step refers to it" in caplog.text
    assert_same(ckpt.load(tmp_path / "r", step=2, strict=True), state)


@pytest.mark.slow
def test_a_full_pack_is_followed_by_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt.format.pack.PACK_BYTES", 20 * MIB)
    state = {f"l{i}": np.full(7 * MIB, i, np.uint8) for i in range(12)}
    checkpoint = ckpt.save(state, tmp_path / "r", codec="none")
    assert len(checkpoint.commit.packs) >= 4
    assert all(pack.nbytes <= 20 * MIB for pack in checkpoint.commit.packs)
    loaded = ckpt.load(tmp_path / "r")
    for name, array in state.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_an_unreadable_sector_counts_as_damage(tmp_path, monkeypatch):
    for step in range(2):
        ckpt.save({"x": np.full(100, step)}, tmp_path / "r", step=step)
    bad = next((tmp_path / "r/steps/1/pack").iterdir()).stat().st_ino
    preadv = os.preadv

    def failing(fd, *rest):
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(ckpt.IntegrityError, match=r"leaf x of step 1 .* I/O error"):
        ckpt.load(tmp_path / "r", step=1)
    with pytest.warns(UserWarning, match="older step 0 .* I/O error"):
        assert ckpt.load(tmp_path / "r")["x"].tolist() == [0] * 100
