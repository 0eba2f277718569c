"""The plugin CkptIO, by which Lightning's own checkpoints and those of Fabric go through ckpt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from typing import Any

from fsspec.core import url_to_fs

from ckpt.adapters import lightning_packages
from ckpt.adapters.lightning_deepspeed import uses_deepspeed
from ckpt.adapters.lightning_state import storable
from ckpt.api import load
from ckpt.checkpointer import Checkpointer
from ckpt.errors import FormatError
from ckpt.repository.repository import open_repository, resolve_url
from ckpt.storage.base.checked_decode import read_json
from ckpt.storage.base.errors import InvalidArgument, NotFound
from ckpt.storage.base.fsync import make_durable_root, sync_folder
from ckpt.storage.base.store import Store

_URL_KEY = "ckpt repository"
"""The key of the URL in a file that the plugin writes."""
_MAX_FILE_BYTES = 1 << 16
"""A longer file was not written by the plugin."""


class CkptIO:
    """A plugin with which a Trainer or Fabric writes and reads its checkpoint files through ckpt.

        trainer = Trainer(plugins=[CkptIO("/data/run/best")], callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=3)])
        fabric = Fabric(plugins=[CkptIO("/data/run/fabric")])

    url: the folder or URL below which each checkpoint is a repository of its own. None means the URL in CKPT_DIR.
    options: arguments of `ckpt.Checkpointer`, such as codec, digest, memory, key and nan.

    At the path that Lightning names there is a small file with the URL of the repository. It is written when the step is
    committed, so Lightning finds no incomplete checkpoint there. `trainer.fit(ckpt_path=…)` and `fabric.load` read it.
    With `save_last="link"`, Lightning may replace such a file with a link. The next save, or the end, then deletes the
    repository of the replaced file.

    Raises:
        InvalidArgument: At the start of `fit`, if the strategy ignores such plugins: DeepSpeedStrategy, ModelParallelStrategy
            with save_distributed_checkpoint=True, and FSDPStrategy with state_dict_type="sharded". In Fabric, at
            `fabric.setup` with DeepSpeedStrategy; its FSDPStrategy and ModelParallelStrategy refuse plugins themselves.
        UnsupportedLeaf: A checkpoint has a value that can't be stored without pickle. The message has its name.
        FormatError: A file that is loaded was not written by this plugin.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> CkptIO:
        # Its base classes are known only now: importing this module must not import Lightning.
        made: CkptIO = object.__new__(lightning_packages.with_bases(cls, lightning_packages.plugin_bases()))
        return made

    def __init__(self, url: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        _is_used.append(True)
        self._url, self._options = url, options
        self._left_out: set[str] = set()
        """The names of the hyperparameters that were left out with a warning."""
        self._folders: set[str] = set()
        """The local folders of the files that this plugin has written."""

    def __reduce__(self) -> tuple[object, ...]:
        return _make, (self._url, self._options)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: object = None) -> None:
        """Save a checkpoint as a step, and then write the file at `path`. Lightning calls this on rank 0."""
        if storage_options is not None:
            raise InvalidArgument("CkptIO takes no storage_options: give options to CkptIO itself")
        self._delete_replaced()
        url = _own_repository(path) or self._repository_url(path)
        options: dict[str, Any] = {"every": None, "keep": 1, "group": None, "scrub": None, **self._options}
        with Checkpointer(url, **options) as checkpointer:
            newest = checkpointer.repository.latest()
            step = 0 if newest is None else newest.step + 1
            checkpointer.save(step, storable(checkpoint, self._left_out), blocking=True)
        _write_file(path, url)
        if "://" not in os.fspath(path):
            self._folders.add(os.path.dirname(os.path.abspath(path)))

    def _repository_url(self, path: str | os.PathLike[str]) -> str:
        return f"{_absolute(str(self._url or resolve_url(None))).rstrip('/')}/{_repository_name(path)}"

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint of a path, with its tensors in host memory. Nothing is unpickled."""
        if not _exists(path):
            raise FileNotFoundError(f"there is no checkpoint at {path}: check ckpt_path")
        url = _read_file(path)
        if url is None:
            raise FormatError(f"{path} was not written by CkptIO: load it in a Trainer without this plugin")
        checkpoint: dict[str, Any] = load(url, group=None, key=self._options.get("key"))
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file at a path, and then the repository of the checkpoint."""
        if not _exists(path):
            return
        url = _own_repository(path)
        fs, name = url_to_fs(os.fspath(path))
        fs.rm(name)
        if url is not None:
            _delete_repository(url)

    def teardown(self) -> None:
        """Delete what no file refers to any more. Each checkpoint is committed when its save returns."""
        self._delete_replaced()

    def _delete_replaced(self) -> None:
        """Delete the repositories of files that are now links: with save_last="link", Lightning removes such a file itself."""
        for folder in self._folders:
            for link in _links(folder):
                replaced_url = self._repository_url(link)
                linked_url = _read_file(link) if _exists(link) else None
                if linked_url is not None and _absolute(linked_url) != replaced_url:
                    _delete_repository(replaced_url)


_is_used: list[bool] = []
"""Not empty once a CkptIO was made. No lock guards it, because it is only added to."""


class _PluginCheck:
    """A callback that refuses a Trainer whose strategy would ignore its CkptIO."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise InvalidArgument if the strategy writes its checkpoints itself."""
        strategy = trainer.strategy
        if _writes_itself(strategy) and _has_plugin(strategy):
            raise InvalidArgument(
                f"{type(strategy).__name__} writes its checkpoints itself and ignores plugins=[CkptIO(url)]: write "
                "callbacks=[Checkpoints(url, every=100)] of ckpt.adapters.lightning instead"
            )


def _has_plugin(strategy: Any) -> bool:
    """Return whether the plugin for checkpoints is a CkptIO, or a wrapper of one, such as AsyncCheckpointIO."""
    plugin = strategy.checkpoint_io
    while plugin is not None and not isinstance(plugin, CkptIO):
        plugin = getattr(plugin, "checkpoint_io", None)
    return plugin is not None


def _writes_itself(strategy: object) -> bool:
    """Return whether a strategy writes the parts of each rank itself, past the plugin for checkpoints."""
    is_sharded = getattr(strategy, "_save_distributed_checkpoint", False)  # of ModelParallelStrategy
    return uses_deepspeed(strategy) or is_sharded or getattr(strategy, "_state_dict_type", "") == "sharded"  # of FSDPStrategy


class _FabricPluginCheck:
    """A callback that refuses a Fabric whose strategy would ignore its CkptIO."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Raise InvalidArgument for DeepSpeed. Fabric calls this when a model and its optimizers are set up."""
        strategy = fabric.strategy
        if uses_deepspeed(strategy) and _has_plugin(strategy):
            raise InvalidArgument(
                f"{type(strategy).__name__} saves by its engine and ignores plugins=[CkptIO(url)]: remove it, and call "
                "ckpt.adapters.deepspeed.attach(model._forward_module, url)"
            )


def plugin_checks() -> list[object]:
    """Return the callbacks that each Trainer needs because of the plugins made so far."""
    return [lightning_packages.with_bases(_PluginCheck, lightning_packages.callback_bases("Callback"))()] if _is_used else []


def fabric_plugin_checks() -> list[object]:
    """Return the callbacks that each Fabric needs because of the plugins made so far."""
    return [_FabricPluginCheck()] if _is_used else []


def _make(url: str | os.PathLike[str] | None, options: dict[str, Any]) -> CkptIO:
    return CkptIO(url, **options)


def _absolute(url: str) -> str:
    """Return a URL that names the same repository from each working directory."""
    return url if "://" in url else os.path.abspath(url)


def _repository_name(path: str | os.PathLike[str]) -> str:
    """Return a name for the repository of a path, which differs between paths with the same last part."""
    text = _absolute(os.fspath(path))
    return f"{re.sub('[^A-Za-z0-9._-]', '_', os.path.basename(text))}-{zlib.crc32(text.encode()):08x}"


def _links(folder: str) -> list[str]:
    """Return the symbolic links in a folder; none if it has been deleted."""
    try:
        return [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
    except FileNotFoundError:
        return []


def _own_repository(path: str | os.PathLike[str]) -> str | None:
    """Return the repository that was made for this path; None where the file is a link or a copy of another checkpoint's."""
    url = _read_file(path) if _exists(path) else None
    return url if url is not None and url.endswith(f"/{_repository_name(path)}") else None


def _delete_repository(url: str) -> None:
    """Delete a repository, if it exists."""
    _delete_all(open_repository(url).store)
    if "://" not in url:
        with contextlib.suppress(OSError):
            os.rmdir(url)


def _delete_all(store: Store) -> None:
    """Delete all files of a store, those of inner folders first. A folder that becomes empty disappears."""
    folders: dict[str, list[str]] = {}
    for entry in store.list():
        folders.setdefault(os.path.dirname(entry.name), []).append(entry.name)
    for folder in sorted(folders, key=lambda name: (-name.count("/"), name)):
        with contextlib.suppress(NotFound):
            store.delete(folders[folder])


# --- the file at the path --------------------------------------------------------------------------------------


def _exists(path: str | os.PathLike[str]) -> bool:
    fs, name = url_to_fs(os.fspath(path))
    return bool(fs.exists(name))


def _read_file(path: str | os.PathLike[str]) -> str | None:
    """Return the URL in a file that this plugin has written, None for any other file."""
    fs, name = url_to_fs(os.fspath(path))
    if fs.isdir(name) or fs.size(name) > _MAX_FILE_BYTES:
        return None
    try:
        url = read_json(fs.cat_file(name))[_URL_KEY]
    except (ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


def _write_file(path: str | os.PathLike[str], url: str) -> None:
    fs, name = url_to_fs(os.fspath(path))
    fs.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    if "file" in (fs.protocol if isinstance(fs.protocol, (tuple, list)) else (fs.protocol,)):
        folder, temporary = os.path.dirname(os.path.abspath(name)), f"{name}.{os.getpid()}.tmp"
        make_durable_root(folder)
        with open(temporary, "w") as file:
            json.dump({_URL_KEY: url}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name)  # a link to another checkpoint is replaced, not followed
        sync_folder(folder)
    else:
        fs.pipe_file(name, json.dumps({_URL_KEY: url}).encode())
