"""A save, from the state to the commit record: plan, stage, encode, write, merge the parts of all ranks, commit.

The package is not called `save`, because `ckpt.save` is a function: a package of the same name would replace it when it is
imported.

Guarantees: a step exists only after all of its files are written, and a save that fails leaves the earlier steps as they are.
Used by `tiers` and the packages above it, and by `training`, which imports only the handle. It imports `repository` and the
packages below it, and never `loading`. Start with `pipeline.save`; `block_plan` decides which bytes go into which block, and
`committer` makes the step exist.
"""
