"""The public module `ckpt.data`: data loaders with a saved position, from `ckpt.training.data`."""

from ckpt.training.data import Loader as Loader
from ckpt.training.data import Stream as Stream
