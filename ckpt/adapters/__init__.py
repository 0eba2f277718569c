"""Adapters for other frameworks, one in each file.

Import the one that you need, as in `from ckpt.adapters.torch import ModelState`. Each imports its framework. Adapters use the
public API and the packages below it; nothing in ckpt imports them.
"""
