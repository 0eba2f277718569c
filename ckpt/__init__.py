"""Checkpoints of large training jobs, saved at the speed of the disk and verified on every read.

Usage:

    import ckpt
    ckpt.save(state, url, step=10)
    state = ckpt.load(url)
"""

from ckpt.support import interrupts as interrupts  # first: Ctrl-C during the other imports must end a command cleanly

# isort: split
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
from ckpt.version import __version__

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
