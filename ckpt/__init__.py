"""Checkpoints of large training jobs: saved at the speed of the disk, verified on every read.

Usage:

    import ckpt
    ckpt.save(state, url, step=10)
    state = ckpt.load(url)
"""

from ckpt import interrupts as interrupts  # before all that takes time

# isort: split
from ckpt import data, pulse
from ckpt.api import load, open, save
from ckpt.checkpoint import Checkpoint, LazyArray, LeafInfo
from ckpt.checkpointer import Checkpointer
from ckpt.handle import SaveHandle
from ckpt.leaves.sharded import Shard
from ckpt.repository import Repository
from ckpt.retention import Keep
from ckpt.stateful import RandomState
from ckpt.storage.errors import (
    AlreadyExists,
    CkptError,
    Fenced,
    FormatError,
    GroupError,
    IntegrityError,
    InvalidArgument,
    InvalidName,
    LeafMismatch,
    LeafNotFound,
    NotFinite,
    NotFound,
    RanksMissing,
    RepositoryBusy,
    SaveFailed,
    SignatureError,
    StagingFailed,
    StateChanged,
    StepNotFound,
    StepRefused,
    StoreError,
    UnknownScheme,
    UnsupportedLeaf,
)
from ckpt.tier import Tier
from ckpt.tree import PerRank
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
