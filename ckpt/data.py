"""`ckpt.data`: the data of a training loop, with a position that is saved. The code is `ckpt.training.data`."""

from ckpt.training.data import Loader as Loader
from ckpt.training.data import Stream as Stream
