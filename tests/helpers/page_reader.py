"""A reader of whole steps, written from docs/reference/format.md alone. It imports nothing of ckpt.

It needs packages that know Parquet, xxh3, blake3, the codecs of numcodecs, and the element types of ml_dtypes.
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import blake3
import ml_dtypes
import numcodecs
import numpy as np
import pyarrow.parquet as parquet
import xxhash

Row = dict[str, Any]

CODECS = ("blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "lzma", "shuffle")
CELL = 262144


class Damaged(Exception):
    """Bytes are not those that their digest, checksum or signature states."""


def require(holds: bool, what: str) -> None:
    """Raise Damaged if a statement does not hold."""
    if not holds:
        raise Damaged(what)


# --- records and the newest step -------------------------------------------------------------------------------------


def read_record(file: Path, kind: str, key: bytes | None = None) -> dict[str, Any]:
    """Return the object of a record. With a key, it must have a signature by that key."""
    data = file.read_bytes()
    try:
        record = json.loads(data)
    except ValueError as error:
        raise Damaged(f"{file}: not JSON") from error
    body = {name: value for name, value in record.items() if name != "digest"}
    require(canonical(record) == data and xxhash.xxh3_128_hexdigest(canonical(body)) == record["digest"], f"{file}: digest")
    require(record["format"] == 1 and record["kind"] == kind, f"{file}: a record of another kind")
    if key is not None:
        signature = body.pop("signature", None)
        require(signature is not None, f"{file}: no signature")
        assert signature is not None
        require(signature["key"] == hmac.digest(key, b"ckpt key id", "sha256").hex()[:16], f"{file}: another key")
        code = hmac.digest(key, b"ckpt commit 1\n" + canonical(body), "sha256").hex()
        require(signature["hmac_sha256"] == code, f"{file}: signature")
    return record  # type: ignore[no-any-return]


def canonical(record: dict[str, Any]) -> bytes:
    """Return the canonical form of a JSON object."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def history(root: Path) -> dict[int, str]:
    """Return each step by its number, the newest last: "" for a step of its history, else "abandoned" or "set aside"."""
    steps = {}
    for folder in (root / "steps").iterdir():
        if (folder / "commit.json").exists():
            commit = read_record(folder / "commit.json", "commit")
            steps[commit["step"]] = (commit.get("line", 0), dict(commit.get("left", [])))
    order = sorted(steps, key=lambda step: (steps[step][0], step))
    newest, left = steps[order[-1]]
    found = {}
    for step in order:
        line = steps[step][0]
        belongs = line == newest or left.get(line, -1) >= step
        found[step] = "" if belongs else "abandoned" if line in left else "set aside"
    return found


# --- a step ----------------------------------------------------------------------------------------------------------


class Step:
    """One step of a repository."""

    def __init__(self, root: Path, step: int, key: bytes | None = None) -> None:
        self._root = root
        self.commit = read_record(root / f"steps/{step}/commit.json", "commit", key)
        self._packs = {pack["name"]: pack["nbytes"] for pack in self.commit["packs"]}
        self.rows: dict[str, list[Row]] = {}
        self.has_differences = False
        for entry in self.commit["manifests"]:
            table = parquet.read_table(io.BytesIO(self._stated_file(entry)))
            metadata = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
            require(metadata["format"] in ("1", "2") and metadata["step"] == str(step), "a manifest of another step")
            self._algorithm = metadata["digest"]
            self.has_differences |= metadata["format"] == "2"
            for row in table.to_pylist():
                self.rows.setdefault(row["leaf"], []).append(row)
        (tree,) = (json.loads(self._stated_file(entry)) for entry in self.commit["trees"])
        require(tree["format"] == 1, "a tree of another format")
        self._tree = tree["tree"]
        self._arrays: dict[str, np.ndarray] = {}

    def _stated_file(self, entry: dict[str, Any]) -> bytes:
        """Return a manifest or a tree, whose length and digest the commit record states."""
        data = (self._root / entry["name"]).read_bytes()
        computed = xxhash.xxh3_128_hexdigest(data) if len(entry["digest"]) == 32 else blake3.blake3(data).hexdigest()
        require((len(data), computed) == (entry["nbytes"], entry["digest"]), entry["name"])
        return data

    def state(self, rank: int = 0) -> Any:
        """Return the state as a rank has it, with numpy arrays for all arrays, and dicts for all objects with fields."""
        return self._value(self._tree, rank)

    # --- arrays ------------------------------------------------------------------------------------------------------

    def array(self, name: str) -> np.ndarray:
        """Return a whole array."""
        if name not in self._arrays:
            rows = self.rows[name]
            whole = np.empty(rows[0]["global_shape"], element_type(rows[0]["dtype"]))
            covered = 0
            for row in rows:
                box = tuple(slice(at, at + length) for at, length in zip(row["offset"], row["shape"], strict=True))
                whole[box] = self._piece(row).view(whole.dtype).reshape(row["shape"])
                covered += math.prod(row["shape"])
            require(covered == whole.size, f"{name}: the boxes don't cover it")
            self._arrays[name] = whole
        return self._arrays[name]

    def _piece(self, row: Row) -> np.ndarray:
        if row["pack"] is None:
            return np.empty(0, np.uint8)
        raw = self._decoded(row["pack"], row["position"], row["stored"], row["raw"], row["codec"], row["checksum"])
        if row.get("base_pack") is not None:
            base = self._decoded(
                row["base_pack"], row["base_position"], row["base_stored"], row["raw"], row["base_codec"], row["base_checksum"]
            )
            require(xxhash.xxh3_128_digest(base) == row["base_digest"], f"{row['leaf']}: base")
            raw = added(base, raw, row["base_width"])
        computed = xxhash.xxh3_128_digest(raw) if self._algorithm == "xxh3-128" else blake3.blake3(raw).digest()
        require(computed == row["digest"], f"{row['leaf']}: digest")
        if row["codec"] is None:
            begin, end = row["start"] // CELL, -(-(row["start"] + row["nbytes"]) // CELL)
            cells = [xxhash.xxh3_64_intdigest(raw[cell * CELL : (cell + 1) * CELL]) for cell in range(begin, end)]
            require(struct.pack(f"<{len(cells)}Q", *cells) == row["cells"], f"{row['leaf']}: cells")
        else:
            require(row["cells"] == b"", f"{row['leaf']}: cells of a block with a codec")
        return np.frombuffer(raw, np.uint8)[row["start"] : row["start"] + row["nbytes"]]

    def _decoded(self, pack: str, position: int, stored: int, raw: int, codec: str | None, checksum: int | None) -> bytes:
        """Return the bytes of a block after its codec."""
        require(pack in self._packs and position % 4096 == 0, f"{pack}: not a pack of the step")
        with open(self._root / pack, "rb") as file:
            file.seek(position)
            data = file.read(stored)
        require(len(data) == stored and position + stored <= self._packs[pack], f"{pack}: too short")
        if codec is not None:
            require(xxhash.xxh3_64_intdigest(data) == checksum, f"{pack}: checksum")
            config = json.loads(codec)
            if config["id"] == "float_planes":
                data = joined_planes(data)
            else:
                require(config["id"] in CODECS, f"{pack}: codec")
                data = bytes(numcodecs.get_codec(config).decode(data))
        require(len(data) == raw, f"{pack}: length")
        return data

    # --- values ------------------------------------------------------------------------------------------------------

    def _value(self, node: Any, rank: int) -> Any:
        if isinstance(node, list):
            return [self._value(each, rank) for each in node]
        if not isinstance(node, dict):
            return node
        if "array" in node:
            return self._array_value(node)
        if "dict" in node:
            return {self._key(key, rank): self._value(each, rank) for key, each in node["dict"]}
        if "object" in node:
            return self._value(node["object"], rank)
        if "namedtuple" in node or "dataclass" in node:
            values = self._value(node["namedtuple"] if "namedtuple" in node else node["dataclass"], rank)
            return dict(zip(node["fields"], values, strict=True))
        for kind, make in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
            if kind in node:
                return make(self._value(each, rank) for each in node[kind])
        if "ranks" in node:
            ranks = node["ranks"]
            own = str(rank % self.commit["world_size"])
            return self._value(ranks[own if own in ranks else min(ranks, key=int)], rank)
        return plain_value(node)

    def _key(self, key: Any, rank: int) -> Any:
        return self._value(key[0], rank) if isinstance(key, list) else key

    def _array_value(self, node: dict[str, Any]) -> Any:
        array = self.array(node["array"])
        if node["kind"] == "scalar":
            return array[()]
        if node["kind"] == "bytes":
            return bytearray(array.tobytes()) if node.get("type") == "bytearray" else array.tobytes()
        return array


def plain_value(node: dict[str, Any]) -> Any:
    """Return the value of a node that is a number, bytes or a scalar."""
    if "int" in node:
        return int(node["int"], 16 if "0x" in node["int"] else 10)
    if "float" in node:
        return struct.unpack(">d", bytes.fromhex(node["float"]))[0]
    if "complex" in node:
        return complex(*struct.unpack(">dd", bytes.fromhex(node["complex"])))
    if "bytes" in node:
        data = base64.b64decode(node["bytes"])
        return bytearray(data) if node.get("type") == "bytearray" else data
    return np.frombuffer(base64.b64decode(node["scalar"]), element_type(node["dtype"]))[0]


def element_type(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of an element type."""
    if name.startswith("numpy:"):
        return np.lib.format.descr_to_dtype(described(json.loads(name.removeprefix("numpy:"))))
    if name == "complex32":
        return np.dtype([("real", "<f2"), ("imag", "<f2")])
    if name == "float128":
        return np.dtype(np.longdouble)
    return np.dtype(name) if name in np.sctypeDict else np.dtype(getattr(ml_dtypes, name))


def described(descr: Any) -> Any:
    """Return a numpy descr with tuples where JSON has lists."""
    if isinstance(descr, str):
        return descr
    return [tuple(tuple(each) if n == 2 else described(each) if n == 1 else each for n, each in enumerate(f)) for f in descr]


def added(base: bytes, difference: bytes, width: int) -> bytes:
    """Return a block from its base and its difference, as integers of `width` bytes."""
    b, z = (np.frombuffer(data, f"<u{width}") for data in (base, difference))
    return np.where(z & 1, b - (z >> 1) - 1, b + (z >> 1)).astype(b.dtype).tobytes()


def joined_planes(stored: bytes) -> bytes:
    """Return the raw bytes of a block of the codec float_planes."""
    version, width, joined, zero, nbytes = struct.unpack_from("<BBBBI", stored)
    require((version, zero) == (1, 0), "float_planes: another version")
    count, at = nbytes // width, 8 + 4 * width
    planes = np.empty((width, count), np.uint8)
    for k, length in enumerate(struct.unpack_from(f"<{width}I", stored, 8)):
        part = stored[at : at + length]
        planes[k] = np.frombuffer(part if length == count else bytes(numcodecs.zstd.Zstd().decode(part)), np.uint8)
        at += length
    if joined:
        exponent, low = planes[-1].copy(), planes[-2].copy()
        planes[-1], planes[-2] = low & 128 | exponent >> 1, (exponent & 1) << 7 | low & 127
    return planes.T.tobytes() + stored[at:]
