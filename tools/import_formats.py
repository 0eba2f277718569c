"""Recognises the format of a checkpoint of another program by its files, and reads it as a state whose arrays stay in them."""

from __future__ import annotations

import copy
import importlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.state.name_patterns import matcher
from ckpt.state.tree import join_path
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import CkptError
from ckpt.tools.export_safetensors import HEADER_LIMIT
from ckpt.tools.import_megatron import is_megatron

_READERS = {
    "safetensors": "import_safetensors", "torch": "import_torch", "dcp": "import_dcp", "hf-bin": "import_hf_bin",
    "deepspeed": "import_zero", "deepspeed-universal": "import_deepspeed", "orbax": "import_orbax", "paddle": "import_paddle",
    "paddle-distributed": "import_paddle_distributed", "tensorflow": "import_tensorflow", "megatron": "import_megatron",
}  # fmt: skip
"""The module of each format that can be imported. It has `read_state(source)`."""
FORMATS = tuple(_READERS)

_SELECTIVE = ("dcp", "megatron", "tensorflow")
"""The formats whose `read_state` also takes the names to read, so that entries that can't be read may be left out."""

_ADVICE = {
    "keras": "a file of Keras: load it with keras, and give the model to ckpt.save",
    "numpy": "a file of numpy: read it with numpy.load, and give the arrays to ckpt.save",
}
"""By format that can't be imported: what the source is, and what to do."""


def read_source(source: Path, requested: str | None, only: tuple[str, ...] = ()) -> Any:
    """Return the state of a source; raise CkptError if its format can't be imported.

    requested: one of FORMATS; None to recognise it.
    only: patterns of the names to read; empty for all.
    """
    if not source.exists() and (index := source.with_name(f"{source.name}.index")).is_file():
        source = index  # TensorFlow names a checkpoint by what its files have in common
    if not source.exists():
        raise CkptError(f"{source} does not exist; name a file or folder of another program")
    if not (source.is_file() or source.is_dir()):  # a read of a pipe may wait without end
        raise CkptError(f"{source} is neither a file nor a folder; copy what it gives to a file, and import that")
    found = requested or find_format(source)
    if found is None:
        raise CkptError(f"{source} is of no format that is recognised: name one with --format ({', '.join(FORMATS)})")
    if found not in _READERS:
        raise CkptError(f"{source} is {_ADVICE[found]}")
    read: Callable[..., Any] = importlib.import_module(f"ckpt.tools.{_READERS[found]}").read_state
    if not only:
        return read(source)
    matches = matcher(only)
    whole = read(source, matches) if found in _SELECTIVE else read(source)
    try:
        state = _keep(whole, matches, "")
    except RecursionError as error:
        raise CkptError(f"{source} is nested too deeply for --only, so it may be damaged: copy it again") from error
    if state is _NOTHING:
        raise CkptError(f"nothing in {source} matches --only {' '.join(only)}; give the names that a load of it shows")
    return state


_NOTHING = object()


def _keep(state: Any, matches: Callable[[str], bool], path: str) -> Any:
    """Return the part of a state whose names match; in a list, None stands for the others."""
    if isinstance(state, dict):
        kept = {
            key: part for key, value in state.items() if (part := _keep(value, matches, join_path(path, key))) is not _NOTHING
        }
        made = copy.copy(state)  # with its attributes; the state may have the same dict under another name, too
        made.clear()
        made.update(kept)
        return made if kept else _NOTHING
    if isinstance(state, (list, tuple)):
        parts = [_keep(value, matches, join_path(path, i)) for i, value in enumerate(state)]
        if all(part is _NOTHING for part in parts):
            return _NOTHING
        return [None if part is _NOTHING else part for part in parts]
    return state if matches(path or "(root)") else _NOTHING


def find_format(source: Path) -> str | None:
    """Return the format of a source by its files, one of FORMATS or of those with advice; None for an unknown one."""
    return _format_of_folder(source) if source.is_dir() else _format_of_file(source)


def _format_of_folder(folder: Path) -> str | None:
    if (folder / ".metadata").is_file():
        return "megatron" if is_megatron(folder) else "dcp"
    patterns = {
        "paddle-distributed": ("[0-9]*.metadata",),
        "safetensors": ("*.safetensors",), "hf-bin": ("pytorch_model*.bin.index.json", "pytorch_model.bin"),
        "deepspeed-universal": ("zero/*/fp32.pt", "*/zero/*/fp32.pt"),
        "deepspeed": ("*zero_pp_rank_*", "*/*zero_pp_rank_*"),
        "orbax": ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "*/_CHECKPOINT_METADATA", "*/_METADATA"),
        "tensorflow": ("checkpoint", "*.index", "variables/variables.index"), "paddle": ("*.pdparams", "*.pdopt"),
    }  # fmt: skip
    for name, globs in patterns.items():
        if any(next(folder.glob(pattern), None) is not None for pattern in globs):
            return name
    return None


def _format_of_file(path: Path) -> str | None:
    name = path.name
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    if name.endswith(".bin.index.json"):
        return "hf-bin"
    by_suffix = {
        ".pdparams": "paddle", ".pdopt": "paddle", ".pdtensor": "paddle", ".metadata": "paddle-distributed",
        ".index": "tensorflow", ".h5": "keras", ".keras": "keras", ".npz": "numpy", ".npy": "numpy",
    }  # fmt: skip
    if path.suffix in by_suffix:
        return by_suffix[path.suffix]
    if path.name == ".metadata":  # of DCP: the folder is the source
        return None
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl") or zipfile.is_zipfile(path):
        return "torch"
    return "safetensors" if _has_safetensors_header(path) else None


def _has_safetensors_header(path: Path) -> bool:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            return 2 <= length <= HEADER_LIMIT and isinstance(parse_json(file.read(length)), dict)
        except ValueError:
            return False
