"""Reads files of torch.save with a torch before 2.7, whose torch.load does not report where the tensors lie in a file.

It runs the unpickler of `weights_only=True` of that torch, and reads the places of the storages from the zip archive.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import IO, Any

from ckpt.storage.base.errors import CkptError

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The header of a record in a zip archive. Its last fields are the lengths of the name and of the extra field."""


def reports_storage_offsets(torch: ModuleType) -> bool:
    """Return whether torch.load to the device meta reports where each storage lies, which it does from torch 2.7 on."""
    return hasattr(torch.UntypedStorage, "_checkpoint_offset")


def load_to_meta(torch: ModuleType, file: IO[bytes]) -> Any:
    """Return the state in a file of torch.save; each storage is on the device meta and has a `_checkpoint_offset`.

    Raises what torch.load raises for a file that it refuses.
    """
    from torch import _weights_only_unpickler

    with zipfile.ZipFile(file) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        records = {record.filename: record for record in archive.infolist()}
        storages: dict[str, Any] = {}

        def storage(saved_id: Any) -> Any:
            kind, storage_type, key, _, elements = saved_id
            if kind != "storage":
                raise CkptError(
                    f"a file of torch.save refers to a {kind}, which is not a storage of a tensor: copy the file again"
                )
            dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
            if key not in storages:
                nbytes = elements * torch.empty(0, dtype=dtype).element_size()
                untyped = torch.UntypedStorage(nbytes, device="meta")
                untyped._checkpoint_offset = data_offset(file, records[f"{folder}/data/{key}"])
                storages[key] = torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
            return storages[key]

        unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(archive.read(f"{folder}/data.pkl")), encoding="utf-8")
        unpickler.persistent_load = storage
        try:
            return unpickler.load()
        except RuntimeError as error:  # torch.load raises an UnpicklingError for it
            raise pickle.UnpicklingError(str(error)) from error


def data_offset(file: IO[bytes], record: zipfile.ZipInfo) -> int:
    """Return the first byte of the data of a record. The field in front of it is longer than that in the directory."""
    file.seek(record.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return record.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


@contextmanager
def allowed_classes(torch: ModuleType, classes: Sequence[Any]) -> Iterator[None]:
    """Allow these classes in files while the context is open, as `torch.serialization.safe_globals` does from torch 2.5 on."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
