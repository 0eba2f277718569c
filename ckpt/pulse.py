"""The public module `ckpt.pulse`: marks that a rank publishes for `ckpt-run`. The code is in `ckpt.training.heartbeat_page`."""

from ckpt.training.heartbeat_page import compute as compute
from ckpt.training.heartbeat_page import phase as phase
