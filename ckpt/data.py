"""The public module `ckpt.data`: loaders of training data whose position is saved. The code is in `ckpt.training.data`."""

from ckpt.training.data import Loader as Loader
from ckpt.training.data import Stream as Stream
