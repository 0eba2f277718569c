"""Writes a model as a folder that `from_pretrained` of transformers or peft loads.

The folder has safetensors files, an index where there are several, and copies of the configuration and the tokenizer. A tied
array is stored once, under its first name in the state, as transformers does it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ckpt.state.name_patterns import parts_with_arrays
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import ByteProgress
from ckpt.tools.export_safetensors import type_code, write_file
from ckpt.tools.hf_adapter import adapter_arrays, find_adapter
from ckpt.tools.restore_options import HfOptions
from ckpt.tools.step_contents import Array, Contents

DEFAULT_SHARD_BYTES = 5 * 10**9
_MODEL_CONFIG = "config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILE = "adapter_model.safetensors"
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "configuration_*.py", "modeling_*.py", "tokenization_*.py",
)  # fmt: skip
"""The files of a model that are copied beside its configuration."""
_METADATA = {"format": "pt"}  # transformers requires it
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", _ADAPTER_FILE)


@dataclass(frozen=True, slots=True)
class HfModel:
    """What a folder will have."""

    contents: Contents
    """The arrays, under the names in the files."""
    is_adapter: bool
    """Whether they are an adapter of peft, and not a model of transformers."""
    options: HfOptions

    @property
    def config_name(self) -> str:
        """The name of the configuration file that `from_pretrained` needs."""
        return _ADAPTER_CONFIG if self.is_adapter else _MODEL_CONFIG

    def write(self, folder: Path, advance: ByteProgress) -> list[str]:
        """Write the folder; return an empty list, as it has no array as plain integers."""
        folder.mkdir()
        _copy_configuration(self.options.config, folder, self.config_name)
        contents = self.contents
        if self.is_adapter:  # peft reads one file
            write_file(contents, str(folder / _ADAPTER_FILE), _METADATA, advance)
            return []
        shards = list(_split(contents.arrays, self.options.max_shard_size or DEFAULT_SHARD_BYTES))
        if len(shards) == 1:
            write_file(contents, str(folder / "model.safetensors"), _METADATA, advance)
            return []
        file_of: dict[str, str] = {}
        for number, arrays in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_file(replace(contents, arrays=arrays), str(folder / name), _METADATA, advance)
            file_of.update({array.name: name for array in arrays})
        index = {"metadata": {"total_size": contents.nbytes}, "weight_map": dict(sorted(file_of.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return []


def prepare(contents: Contents, options: HfOptions) -> HfModel:
    """Return the model or adapter to write, without reading an array; raise CkptError for what a folder can't have."""
    _require_model_alone(contents)
    adapter = find_adapter([*(a.name for a in contents.arrays), *contents.tied], options.adapter)
    config = _read_config(options.config, _MODEL_CONFIG if adapter is None else _ADAPTER_CONFIG)
    if adapter is not None:
        arrays = adapter_arrays(_with_tied(contents), adapter, config)
    else:
        arrays = _with_tied(contents) if _has_untied_weights(config) else contents.arrays
    for array in arrays:
        if type_code(array) is None:
            raise CkptError(
                f"leaf {array.leaf} has type {array.dtype}, which transformers can't read: leave it out with --only"
            )
    if not arrays:
        raise CkptError(f"no array of {contents.checkpoint.where} is chosen; choose those of a model with --only")
    chosen = replace(contents, arrays=arrays, tied={}, values={}, nodes={})
    return HfModel(chosen, adapter is not None, options)


def require_replaceable(folder: Path) -> None:
    """Raise CkptError if an existing folder has a file that an export could not have written."""
    if not folder.is_dir():
        raise CkptError(f"{folder} is not a folder, so it is not replaced by one: name another")
    allowed = (*_WEIGHTS, _MODEL_CONFIG, _ADAPTER_CONFIG, *_COPIED)
    for path in sorted(folder.iterdir()):
        if path.is_dir() or not any(fnmatch(path.name, pattern) for pattern in allowed):
            raise CkptError(
                f"{folder} exists and has {path.name}, which is not a file of an exported model, so it is not replaced: "
                "remove it, or name another folder"
            )


def _require_model_alone(contents: Contents) -> None:
    """Raise CkptError if the step has more than the arrays of a model, and the user has not chosen a part."""
    if contents.only or contents.names.changes:
        return
    if parts := parts_with_arrays(contents.tree):
        raise CkptError(
            f"{contents.checkpoint.where} has the parts {', '.join(parts[:5])}, and transformers expects the names of a model "
            f"alone: choose its part, for example with --strip {parts[0]}."
        )


def _with_tied(contents: Contents) -> list[Array]:
    """Return the arrays, and those with further names once more under each of them."""
    by_name = {array.name: array for array in contents.arrays}
    return [*contents.arrays, *(replace(by_name[first], name=name) for name, first in contents.tied.items())]


def _split(arrays: list[Array], most: int) -> Iterator[list[Array]]:
    """Yield the arrays of each file, in order; an array above the limit has a file of its own."""
    shard: list[Array] = []
    nbytes = 0
    for array in arrays:
        if shard and nbytes + array.nbytes > most:
            yield shard
            shard, nbytes = [], 0
        shard.append(array)
        nbytes += array.nbytes
    yield shard


# --- the configuration -----------------------------------------------------------------------------------------


def _config_file(source: Path, name: str) -> Path:
    return source / name if source.is_dir() else source


def _read_config(source: Path | None, name: str) -> dict[str, Any]:
    """Return the configuration that --config names; an empty dict without it."""
    if source is None:
        return {}
    path = _config_file(source, name)
    if not path.is_file():
        raise CkptError(f"--config {source}: there is no {name} in it; save the configuration there, or name another folder")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CkptError(f"--config {path} is not JSON ({error}); name a {name}") from error
    if not isinstance(config, dict):
        raise CkptError(f"--config {path} is not a JSON object; name a {name}")
    if name == _ADAPTER_CONFIG and "peft_type" not in config:
        raise CkptError(f"--config {path} is not a configuration of peft: it has no peft_type; name an {name}")
    return config


def _has_untied_weights(config: Mapping[str, object]) -> bool:
    """Return whether the configuration says that transformers will not tie the weights that were tied in the state."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return any(part.get("tie_word_embeddings") is False for part in parts)


def _copy_configuration(source: Path | None, folder: Path, name: str) -> None:
    if source is None:
        return
    shutil.copyfile(_config_file(source, name), folder / name)
    if source.is_dir():
        for path in sorted(source.iterdir()):
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _COPIED):
                shutil.copyfile(path, folder / path.name)
