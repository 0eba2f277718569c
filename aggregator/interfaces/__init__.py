"""The interfaces of a namespace: a store for checkpoints, and an fsspec filesystem.

Guarantees: the store passes the contract of all stores (`ckpt.storage.testing`). Used by `ckpt.repository`, `tools` and fsspec;
it imports `file_io` and the packages below it. Start with `store` and `fsspec_filesystem`.
"""
