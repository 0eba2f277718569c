"""`ckpt.pulse`: what a rank publishes of itself. The code is `ckpt.training.heartbeat_page`."""

from ckpt.training.heartbeat_page import compute as compute
from ckpt.training.heartbeat_page import phase as phase
