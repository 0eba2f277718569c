"""Adapters for other frameworks: one file for each, with its parts in files whose names begin with the same word.

Import the one that you need, as in `from ckpt.adapters.torch import ModelState`. Each imports its framework. Adapters use the
public API and the packages below it; nothing in ckpt imports them. What several of them use is named after what it does, such
as `epoch_random`, `peer_memory` and `weights`.

Start with `torch`. docs/design/adding-a-framework.md describes what another adapter needs, and `testing` has its tests.
"""
