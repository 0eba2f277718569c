"""Reads checkpoints of Megatron-Core (torch_dist) as the state that `ckpt.adapters.megatron` saves.

Such a folder is one of torch.distributed.checkpoint with a file common.pt, a pickle with the arguments of the program. Of
pickles, only plain values, tensors, arrays of numpy and namespaces are read; what else they have is left out, and named.
"""

from __future__ import annotations

import argparse
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import click

from ckpt.state.tree import join_path
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import CkptError, NotFound, StoreError, first_line
from ckpt.storage.base.fd_io import convert_os_errors
from ckpt.tools.common import import_optional
from ckpt.tools.import_dcp import MetadataUnpickler, read_entries
from ckpt.tools.import_files import raise_if_unreadable, refuse_damage

COMMON = "common.pt"
_ZIP_MAGIC = b"PK\x03\x04"
_CLASSES = {
    "builtins": {"set", "complex"}, "collections": {"OrderedDict", "defaultdict"},
    "_codecs": {"encode"}, "numpy": {"ndarray", "dtype"}, "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"}, "torch": {"Size"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
}  # fmt: skip
"""By module: the classes and functions of which a pickle may make values. None of them runs code of the pickle."""


def is_megatron(folder: Path) -> bool:
    """Return whether a folder of torch.distributed.checkpoint was written by Megatron-Core."""
    path = folder / "metadata.json"
    try:
        with convert_os_errors("reading", str(path)):
            found = parse_json(path.read_bytes())
    except (NotFound, ValueError):
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == "torch_dist"


def read_state(source: Path, matches: Callable[[str], bool] | None = None) -> Any:
    """Return {"tensors": {key: leaf}, "objects": {key: object}, "common": values}.

    matches: returns whether to read an entry, by its name in this state; None for all.
    """
    left_out: list[str] = []
    state: dict[str, Any] = {"tensors": {}, "objects": {}}
    for name, is_tensor, read in read_entries(source, _MegatronMetadataUnpickler):
        path = f"{'tensors' if is_tensor else 'objects'}.{name}"
        if matches is not None and not matches(path):
            continue
        try:
            state["tensors" if is_tensor else "objects"][name] = read()
        except CkptError as error:
            if is_tensor or isinstance(error, StoreError):  # a StoreError says nothing about the object
                raise
            left_out.append(path)
    if (source / COMMON).is_file() and (matches is None or matches("common")):
        with refuse_damage(source / COMMON, "copy it again, or leave it out with --only"):
            state["common"] = _plain(_read_common(source / COMMON), "common", left_out)
    if left_out:
        shown = ", ".join(left_out[:8]) + (f" and {len(left_out) - 8} more" if len(left_out) > 8 else "")
        click.echo(f"{source}: these are not plain values, and are not imported: {shown}", err=True)
    return state


class _Unknown:
    """Stands for an object of a class that is not read. It takes any arguments, and does nothing with them."""

    def __new__(cls, *args: object, **options: object) -> _Unknown:
        return super().__new__(cls)

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, *args: object, **options: object) -> _Unknown:
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, item: object) -> None:
        """Ignore an item of a list."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


class _MegatronMetadataUnpickler(MetadataUnpickler):
    """Reads the tables of DCP's metadata; Megatron also stores the plans of all ranks there, which become `_Unknown`."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError:
            return _Unknown

    @staticmethod
    def find_member(kind: object, name: str) -> Any:
        """Return a member of an enumeration that DCP's metadata has, or else an `_Unknown`."""
        try:
            return MetadataUnpickler.find_member(kind, name)
        except (pickle.UnpicklingError, KeyError):
            return _Unknown()


class _Namespace(argparse.Namespace):
    """Takes the place of argparse.Namespace in pickles, which could change the attributes of that class."""


class _PlainUnpickler(pickle.Unpickler):
    """Finds no classes but those of plain values. Others become `_Unknown`, so that nothing of them runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("argparse", "Namespace"):
            return _Namespace
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch":
            torch = import_optional("torch", "a checkpoint of Megatron", "torch")
            found = vars(torch).get(name)  # not getattr: torch imports some of its modules when they are asked for
            if isinstance(found, torch.dtype) or (name.endswith("Storage") and isinstance(found, type)):
                return found
        return _Unknown


class _PlainPickle:
    """What torch.load uses in place of the module pickle."""

    Unpickler = _PlainUnpickler

    @staticmethod
    def load(file: IO[bytes], **options: Any) -> Any:
        return _PlainUnpickler(file, **options).load()


def _read_common(path: Path) -> Any:
    torch = import_optional("torch", "a checkpoint of Megatron", "torch")
    try:
        with open(path, "rb") as file:
            if _is_torchscript(torch, file):  # torch.load would give it to torch.jit.load, which runs code
                raise CkptError(f"{path} is an archive of TorchScript, which has code: leave it out with --only")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_PlainPickle)
    except CkptError:
        raise
    except Exception as error:
        raise_if_unreadable(error, str(path))
        raise CkptError(f"{path} can't be read ({first_line(error)}): copy it again, or leave it out with --only") from error


def _is_torchscript(torch: ModuleType, file: IO[bytes]) -> bool:
    """Return whether torch.load takes a file as an archive of TorchScript. It reads the list of records as torch.load does."""
    is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    file.seek(0)
    return is_zip and "constants.pkl" in torch._C.PyTorchFileReader(file).get_all_records()


def _plain(value: Any, path: str, left_out: list[str]) -> Any:
    """Return the value as `ckpt.adapters.megatron` stores it, without objects that were not read; their names are added."""
    from ckpt.adapters.megatron_values import encoded

    if isinstance(value, argparse.Namespace):
        kept = _plain(vars(value), path, left_out)
        return encoded(argparse.Namespace(**kept), path)
    if isinstance(value, dict):
        for key in [key for key, each in value.items() if _is_unknown(each) or _is_unknown(key)]:
            left_out.append(join_path(path, str(key)))
            del value[key]
        kind = dict if isinstance(value, defaultdict) else type(value)  # the function that makes its values is not read
        return kind((key, _plain(each, join_path(path, key), left_out)) for key, each in value.items())
    if type(value) in (list, tuple):
        if any(map(_is_unknown, value)):
            left_out.append(path)
            return None
        return type(value)(_plain(each, join_path(path, i), left_out) for i, each in enumerate(value))
    return encoded(value, path)


def _is_unknown(value: object) -> bool:
    return isinstance(value, _Unknown) or value is _Unknown
