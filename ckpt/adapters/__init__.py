"""Adapters for other frameworks: one file for each, with its parts in files whose names begin with the same word.

Import the one that you need, as in `from ckpt.adapters.torch import ModelState`. What several of them use is named after what
it does, such as `epoch_random`, `peer_memory` and `weights`. `adapt` has what `ckpt-run --adapt` does in scripts without ckpt.
docs/design/adding-a-framework.md describes what another adapter needs, and `testing` has its tests.

Guarantees: a framework is imported only with an adapter that needs it, and no other package of ckpt imports an adapter. Used by
training programs, by `tools`, and through entry points by Lightning, vLLM and SGLang. Start with `torch`.
"""
