"""Reads files of torch.save as a state whose tensors stay in the files.

Nothing but what `weights_only=True` allows is unpickled.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ckpt.state.tree import join_path
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.common import import_optional
from ckpt.tools.import_files import DAMAGE, FileLeaf, FileRegion, raise_if_unreadable, refuse_damage, whole_file_leaf
from ckpt.tools.import_old_torch import allowed_classes, data_offset, load_to_meta, reports_storage_offsets

_CHECKED_BYTES = 4 << 20
_ORDER_BYTES = 16
"""The most bytes of the record of the byte order that are read."""
_PLACES_RECORD = ".format_version"
"""In a file with this record, torch computes where each storage lies, in the order in which it loads them."""
_REPACKED_ADVICE = "load it with torch, and save it again"


def read_state(source: Path, stand_ins: Sequence[Any] = ()) -> Any:
    """Return the state in a file, with a `FileLeaf` for each tensor; a file of torch before 1.6 is read into memory.

    stand_ins: classes without code, and functions, which take the place of those of the same names. Others are refused.
    """
    torch = import_optional("torch", "a file of torch.save", "torch")
    with allowed_classes(torch, stand_ins) if stand_ins else nullcontext(), open(source, "rb") as file:
        if not zipfile.is_zipfile(source):
            return _load(torch, file, str(source), "cpu")
        return read_slice(file, str(source), 0, str(source))


def read_slice(file: IO[bytes], path: str, start: int, where: str) -> Any:
    """Return the state of a file of torch.save that lies in another file.

    file: the bytes of the inner file alone.
    path: the outer file.
    start: where the inner file begins in it.
    where: what is read, for messages.
    """
    torch = import_optional("torch", "a file of torch.save", "torch")
    _require_byte_order(file, where)
    storages = _require_intact(file, where)
    file.seek(0)
    state = _load(torch, file, where, "meta")

    def leaf_of(tensor: Any, name: str) -> FileLeaf:
        leaf = _leaf(torch, tensor, f"{where}: {name}", path, start)
        _require_stored(tensor, f"{where}: {name}", storages)
        return leaf

    with refuse_damage(where, "copy it again"):
        return replace_tensors(torch, state, leaf_of)


def _require_byte_order(file: IO[bytes], where: str) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            found = [record for record in archive.infolist() if record.filename.rpartition("/")[2] == "byteorder"]
            for record in found:
                if not record.CRC:  # written without checksums; zipfile checks none if the attribute is missing
                    del record.CRC
            order: str = sys.byteorder
            if found:
                with archive.open(found[0]) as opened:
                    order = opened.read(_ORDER_BYTES).decode()
    except (*DAMAGE, OSError) as error:
        raise_if_unreadable(error, where)
        raise CkptError(f"{where} is not a file of torch.save, or is damaged ({error}): copy it again") from error
    if order != sys.byteorder:
        raise CkptError(f"{where} was written by a machine of other byte order: load it with torch, and use ckpt.save")


def _require_intact(file: IO[bytes], where: str) -> dict[int, int]:
    """Return the length of the record of each storage, by the offset of its first byte.

    Raises CkptError if a record is compressed, or does not match its CRC-32, which torch.load does not check for tensors, or
    if the storages are in another order than that in which torch computes their places.
    """
    storages = {}
    keys: dict[int, str] = {}
    has_places = False
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise CkptError(f"{where} was compressed by another program than torch: {_REPACKED_ADVICE}")
                if record.filename.split("/")[-2:-1] == ["data"]:
                    offset = data_offset(file, record)
                    storages[offset], keys[offset] = record.file_size, record.filename.rpartition("/")[2]
                has_places |= record.filename.endswith(_PLACES_RECORD)
                if record.CRC:  # torch.serialization.set_crc32_options(False) writes 0
                    with archive.open(record) as opened:
                        while opened.read(_CHECKED_BYTES):
                            pass
    except (*DAMAGE, OSError) as error:
        raise_if_unreadable(error, where)
        raise CkptError(f"{where} is damaged ({first_line(error)}): copy it again") from error
    order = [keys[offset] for offset in sorted(keys)]
    if has_places and order != sorted(order, key=lambda key: (len(key), key)):  # decimal numbers, in the order of the tensors
        raise CkptError(f"{where} has its tensors in another order than torch writes them: {_REPACKED_ADVICE}")
    return storages


def _load(torch: ModuleType, file: IO[bytes], where: str, device: str) -> Any:
    try:
        if device == "meta" and not reports_storage_offsets(torch):
            return load_to_meta(torch, file)
        return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CkptError(
            f"{where} has objects that weights_only refuses ({_refused(error)}): leave them out with --only (DCP), or if you "
            "trust them load it with torch, and use ckpt.save"
        ) from error
    except (*DAMAGE, OSError) as error:
        raise_if_unreadable(error, where)
        raise CkptError(f"{where} is not a file of torch.save, or is damaged ({first_line(error)}): copy it again") from error


def _refused(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0][:150] if lines else first_line(error)[:150]


def replace_tensors(torch: ModuleType, state: Any, leaf_of: Callable[[Any, str], FileLeaf]) -> Any:
    """Return the state with leaves for its tensors. Dicts and lists are changed in place, to keep their attributes."""

    def replaced(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return leaf_of(value, path or "(root)")
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = replaced(item, join_path(path, key))
        elif isinstance(value, list):
            value[:] = [replaced(item, join_path(path, i)) for i, item in enumerate(value)]
        elif type(value) is tuple:
            return tuple(replaced(item, join_path(path, i)) for i, item in enumerate(value))
        return value

    return replaced(state, "")


def _require_stored(tensor: Any, where: str, storages: Mapping[int, int]) -> None:
    """Raise CkptError if the elements of a tensor do not lie in the record of a storage.

    torch.load does not look up where a record is: it computes that from what torch.save writes.
    """
    if not tensor.numel():
        return
    end = tensor.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if end * tensor.element_size() > storages.get(tensor.untyped_storage()._checkpoint_offset, 0):
        raise CkptError(f"{where} is not where torch.save writes it, as in a file that was packed again: {_REPACKED_ADVICE}")


def _leaf(torch: ModuleType, tensor: Any, where: str, path: str, start: int) -> FileLeaf:
    """Return the leaf of a tensor on the device meta that was loaded from a file."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise CkptError(f"{where} is a {tensor.layout} {type(tensor).__name__}, not a plain tensor: store its plain tensors")
    if tensor.is_conj() or tensor.is_neg():  # the bytes in the file are not those of its elements
        raise CkptError(f"{where} is a conjugate or negative view: load it with torch, and give its tensors to ckpt.save")
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise CkptError(
            f"torch {torch.__version__} does not report where the tensors of a file lie: install torch 2.7, or load the file "
            "with torch and use ckpt.save"
        )
    size = tensor.element_size()
    strides = tuple(step * size for step in tensor.stride())
    region = FileRegion(path, start + offset + tensor.storage_offset() * size, tuple(tensor.shape), strides, size)
    attributes = {"parameter": True} if isinstance(tensor, torch.nn.Parameter) else {}
    if tensor.requires_grad:
        attributes["requires_grad"] = True
    return whole_file_leaf(region, str(tensor.dtype).removeprefix("torch."), "torch", attributes)
