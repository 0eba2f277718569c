"""Reads a model of transformers in files of torch.save: `pytorch_model.bin`, or several with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_files import list_folder
from ckpt.tools.import_safetensors import INDEX_SUFFIX, read_index
from ckpt.tools.import_torch import read_state as read_torch_file


def read_state(source: Path) -> dict[str, Any]:
    """Return the arrays of a folder, or of an index and its files, by name."""
    if source.is_dir():
        indexes = list_folder(source, f"pytorch_model*.bin{INDEX_SUFFIX}")
        source = indexes[0] if indexes else source / "pytorch_model.bin"
    if not source.name.endswith(INDEX_SUFFIX):
        state: dict[str, Any] = read_torch_file(source)
        return state
    file_of = read_index(source)
    files = {name: read_torch_file(source.parent / name) for name in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if not isinstance(files[file], dict) or name not in files[file]:
            raise CkptError(f"{source} names {name} in {file}, which lacks it: download the file again")
    return {name: files[file][name] for name, file in file_of.items()}
