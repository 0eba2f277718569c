"""A load: the step that all ranks load, the arrays of `like` that it fills, and reads that ranks share.

The package is not called `load`, because `ckpt.load` is a function (see `saving`).

Guarantees: all ranks of a group load the same step, or each of them raises an error. Used by `api` and the modules above it; it
imports `repository` and the packages below it, and never `saving`. Start with `target_matching`, then `rank_agreement`.
"""
