"""Interfaces of other libraries, one a file: import the one you need, as in `from ckpt.adapters.torch import ModelState`."""
