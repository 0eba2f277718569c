"""Reads folders of torch.distributed.checkpoint as a state whose tensors stay in the files.

`.metadata` is a pickle. It is read with the classes of DCP's metadata alone; anything else in it is refused. Tensors and other
values are read as `weights_only=True` allows.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from ckpt.state.boxes import Box
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.common import import_optional
from ckpt.tools.import_files import DAMAGE, FileLeaf, insert, raise_if_unreadable, refuse_damage
from ckpt.tools.import_torch import read_slice

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

METADATA = ".metadata"
_COPY_ADVICE = "copy the folder again"
_METADATA_CLASSES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
    "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}  # fmt: skip


def _joined_path(*parts: object) -> str:
    """Return a path as text. It takes the place of the class Path, whose attributes a pickle could change."""
    return "/".join(map(str, parts))


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata. It finds no other classes and functions, so that it can run nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return self.find_member
        torch = import_optional("torch", "a folder of torch.distributed.checkpoint", "torch")
        # Not getattr: torch imports some of its modules when they are asked for.
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if module == "pathlib" and name in ("PosixPath", "Path", "PurePosixPath"):
            return _joined_path
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it has a {module}.{name}, which is none of DCP's metadata")
        return super().find_class(module, name)

    @staticmethod
    def find_member(kind: object, name: str) -> Any:
        """Return a member of an enumeration. Python 3.11.0 to 3.11.3 store members as calls of getattr."""
        if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            raise pickle.UnpicklingError(f"it has a getattr of {kind!r}, which is not an enumeration of DCP's metadata")
        return kind[name]


def read_state(source: Path, matches: Callable[[str], bool] | None = None) -> Any:
    """Return the state that was saved in a folder, nested as it was if its metadata has the paths.

    matches: returns whether to read a value, by its name; None for all. What it leaves out is not opened.
    """
    metadata = _read_metadata(source / METADATA)
    flat = {name: read() for name, _, read in _entries(source, metadata) if matches is None or matches(name)}
    others = sorted(path.name for path in source.glob("*.pt"))
    if others:
        click.echo(
            f"{source} has {', '.join(others)} too, which is not imported: import it to another URL if you need it", err=True
        )
    with refuse_damage(source / METADATA, _COPY_ADVICE):
        return _nested(flat, metadata.planner_data)


def read_entries(source: Path, unpickler: type[MetadataUnpickler]) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Yield the name of each entry of a folder, whether it is a tensor, and a function that reads it before the next one."""
    return _entries(source, _read_metadata(source / METADATA, unpickler))


def _entries(source: Path, metadata: Any) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    regions: dict[str, dict[tuple[int, ...], Any]] = {}
    with refuse_damage(source / METADATA, _COPY_ADVICE):
        for index, info in metadata.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                how = ", ".join(info.transform_descriptors)
                raise CkptError(f"{source}: {index.fqn} is compressed ({how}): load it with DCP, and use ckpt.save")
            regions.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
    files = _Files(source)
    try:
        for name, entry in metadata.state_dict_metadata.items():
            yield name, hasattr(entry, "chunks"), partial(files.read_entry, name, entry, regions.get(name, {}))
    finally:
        files.close()


def _read_metadata(path: Path, unpickler: type[MetadataUnpickler] = MetadataUnpickler) -> Any:
    try:
        with open(path, "rb") as file:
            metadata = unpickler(file).load()
        if not isinstance(metadata.storage_data, dict) or not isinstance(metadata.state_dict_metadata, dict):
            raise ValueError("it has no table of the stored parts")
        if not all(isinstance(name, str) for name in metadata.state_dict_metadata):
            raise ValueError("it has a name that is not text")
    except FileNotFoundError as error:
        raise CkptError(f"{path} is missing, so the folder is not a complete checkpoint of DCP: import another one") from error
    except (*DAMAGE, ImportError) as error:
        raise_if_unreadable(error, str(path))
        raise CkptError(f"{path} can't be read ({first_line(error)}): load it with DCP, and use ckpt.save") from error
    return metadata


class _Files:
    """The files of a folder, each opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[bytes]] = {}

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()

    def read_entry(self, name: str, entry: Any, parts: dict[tuple[int, ...], Any]) -> Any:
        """Return the leaf of a tensor, or another value."""
        where = f"{self._folder}: {name}"
        with refuse_damage(where, _COPY_ADVICE):
            return self._read_entry(where, entry, parts)

    def _read_entry(self, where: str, entry: Any, parts: dict[tuple[int, ...], Any]) -> Any:
        if not hasattr(entry, "chunks"):
            if len(parts) != 1:
                raise CkptError(f"{where} has {len(parts)} stored parts in {METADATA}, not one: copy the folder again")
            return self._read_part(next(iter(parts.values())), where)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        regions = []
        for chunk in entry.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if box.offset not in parts:
                raise CkptError(f"{where} lacks the part at {list(box.offset)} in {METADATA}: copy the folder again")
            leaf = self._read_part(parts[box.offset], where)
            region = leaf.single_region if isinstance(leaf, FileLeaf) else None
            if region is None or region.shape != box.shape or leaf.dtype != dtype:
                raise CkptError(
                    f"{where}: the stored part at {list(box.offset)} is not the one that {METADATA} describes: "
                    "copy the folder again"
                )
            regions.append((box, region))
        try:
            return FileLeaf(dtype, tuple(entry.size), regions)
        except CkptError as error:
            raise CkptError(f"{where}: {error}") from error

    def _read_part(self, info: Any, where: str) -> Any:
        name = str(info.relative_path)
        path = self._folder / name
        if name.startswith("/") or ".." in name.split("/"):
            raise CkptError(
                f"{where} is in {name!r}, which is outside of the folder, where no file is read: move it into the folder"
            )
        if name not in self._open:
            try:
                self._open[name] = open(path, "rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                raise CkptError(f"{where} is in {path}, which is missing: copy the folder again") from error
        part = io.BufferedReader(_Slice(self._open[name], info.offset, info.length))
        return read_slice(part, str(path), info.offset, where)


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


def _nested(flat: dict[str, Any], paths: object) -> Any:
    """Return the values in the dicts and lists that DCP has flattened; `paths` has the keys of each name.

    Raises ValueError if the keys of a value are unusable, or those of another value.
    """
    if not isinstance(paths, dict) or not set(flat) <= paths.keys():
        return flat
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        if not isinstance(paths[name], (tuple, list)) or not paths[name]:
            raise ValueError(f"the path of {name} is {paths[name]!r:.60}")
        insert(root, paths[name], value, len(paths))
    return root
