"""A load: the step that all ranks load, the arrays of `like` that it fills, and reads that ranks share.

The package is not called `load`, because `ckpt.load` is a function (see `saving`). It imports `repository`, `groups` and the
packages below them, and never `saving`. Start with `target_matching`, then `group_load`.
"""
