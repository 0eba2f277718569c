"""The public module `ckpt.pulse`: marks of a rank for `ckpt-run`, from `ckpt.training.heartbeat_marks`."""

from ckpt.training.heartbeat_marks import compute as compute
from ckpt.training.heartbeat_marks import phase as phase
