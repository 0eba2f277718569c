"""The public module `ckpt.data`: data loaders with a saved position, from `ckpt.training.data_loader`."""

from ckpt.training.data_loader import Loader as Loader
from ckpt.training.data_loader import Stream as Stream
