"""Interfaces of other libraries, one a file.

Import the one you need, as in `from ckpt.adapters.torch import ModelState`: each imports its framework. They use the public API
and what is below it; nothing in ckpt imports them.
"""
