"""Damage: one bit of a stored file is changed."""

from __future__ import annotations

from pathlib import Path

import ckpt


def flip_bit(path: Path, at: int = 10_000) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


def flip_bit_of_leaf(checkpoint: ckpt.Checkpoint, leaf: str) -> None:
    """Change one bit of a leaf that is stored in a folder without a codec."""
    row = checkpoint.manifest().find([(leaf, None)])[0][0]
    assert row.pack is not None
    assert row.codec is None
    flip_bit(Path(checkpoint.store.root) / row.pack, row.position + row.start)


def put_on_bad_sector(path: Path) -> None:
    """Replace a file by one whose read fails with EIO, as on a bad sector. A rename can replace it again."""
    path.unlink()
    path.symlink_to("/proc/self/mem")  # read(2) of its first byte fails with EIO
