"""A namespace as others see it: as a store for checkpoints, and as an fsspec filesystem.

It imports `file_io` and what is below. Start with `store` and `fsspec_filesystem`.
"""
