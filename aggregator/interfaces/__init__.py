"""The interfaces of a namespace: a store for checkpoints, and an fsspec filesystem.

It imports `file_io` and the packages below. Start with `store` and `fsspec_filesystem`.
"""
