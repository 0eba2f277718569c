"""Checkpoints of large training jobs, saved at the speed of the disk and verified on every read.

    import ckpt
    ckpt.save(state, url, step=10)
    state = ckpt.load(url)

Guarantees: a committed step is complete, and a save that fails leaves the earlier steps as they are. Used by training programs,
`adapters` and `tools`. Start with `api`. Its functions `save` and `load` name each stage of their work.
"""

from ckpt.support import interrupts as interrupts  # first: Ctrl-C during the other imports must end a command cleanly

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from ckpt.support.other_package import warn_of_other_package
from ckpt.support.source_checkout import require_all_parts
from ckpt.version import __version__

if TYPE_CHECKING:
    from ckpt import data, pulse
    from ckpt import dtypes as dtypes
    from ckpt.api import load, open, save
    from ckpt.checkpointer import Checkpointer
    from ckpt.errors import (
        Fenced,
        FormatError,
        GroupError,
        LeafMismatch,
        LeafNotFound,
        NotFinite,
        RanksMissing,
        RepositoryBusy,
        SaveFailed,
        SignatureError,
        StagingFailed,
        StateChanged,
        StepNotFound,
        StepRefused,
        StepSkipped,
        UnsupportedLeaf,
    )
    from ckpt.repository.checkpoint import Checkpoint, LazyArray, LeafInfo
    from ckpt.repository.repository import Repository
    from ckpt.repository.retention import Keep
    from ckpt.saving.handle import SaveHandle
    from ckpt.state.leaves.sharded import Shard
    from ckpt.state.stateful import RandomState
    from ckpt.state.tree import PerRank
    from ckpt.storage.base.errors import (
        AlreadyExists,
        CkptError,
        IntegrityError,
        InvalidArgument,
        InvalidName,
        NotFound,
        StoreError,
        UnknownScheme,
    )
    from ckpt.tiers.tier_spec import Tier

_MODULES = {
    "ckpt.api": "load open save",
    "ckpt.checkpointer": "Checkpointer",
    "ckpt.errors": (
        "Fenced FormatError GroupError LeafMismatch LeafNotFound NotFinite RanksMissing RepositoryBusy "
        "SaveFailed SignatureError StagingFailed StateChanged StepNotFound StepRefused StepSkipped "
        "UnsupportedLeaf"
    ),
    "ckpt.repository.checkpoint": "Checkpoint LazyArray LeafInfo",
    "ckpt.repository.repository": "Repository",
    "ckpt.repository.retention": "Keep",
    "ckpt.saving.handle": "SaveHandle",
    "ckpt.state.leaves.sharded": "Shard",
    "ckpt.state.stateful": "RandomState",
    "ckpt.state.tree": "PerRank",
    "ckpt.storage.base.errors": (
        "AlreadyExists CkptError IntegrityError InvalidArgument InvalidName NotFound StoreError UnknownScheme"
    ),
    "ckpt.tiers.tier_spec": "Tier",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

require_all_parts()
warn_of_other_package()


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use: `import ckpt` alone then takes a tenth of the time.

    `ckpt-run`, `ckpt-node` and the processes that guard ranks import the package as well, and use few of its names.
    """
    if module := _MODULE_OF.get(name):
        value = globals()[name] = getattr(importlib.import_module(module), name)
        return value
    try:
        return importlib.import_module(f"ckpt.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ckpt.{name}":
            raise
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AlreadyExists",
    "Checkpoint",
    "Checkpointer",
    "CkptError",
    "Fenced",
    "FormatError",
    "GroupError",
    "IntegrityError",
    "InvalidArgument",
    "InvalidName",
    "Keep",
    "LazyArray",
    "LeafInfo",
    "LeafMismatch",
    "LeafNotFound",
    "NotFinite",
    "NotFound",
    "PerRank",
    "RandomState",
    "RanksMissing",
    "Repository",
    "RepositoryBusy",
    "SaveFailed",
    "SaveHandle",
    "Shard",
    "SignatureError",
    "StagingFailed",
    "StateChanged",
    "StepNotFound",
    "StepRefused",
    "StepSkipped",
    "StoreError",
    "Tier",
    "UnknownScheme",
    "UnsupportedLeaf",
    "__version__",
    "data",
    "load",
    "open",
    "pulse",
    "save",
]
