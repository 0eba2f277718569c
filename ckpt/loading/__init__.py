"""A load: which saved leaf goes to which array, which step all ranks agree on, and reads that ranks share.

The package is not called `load`, because `ckpt.load` is a function (see `saving`). It imports `repository`, `groups` and what
is below, and never `saving`. Start with `target_matching`, then `group_load`.
"""
