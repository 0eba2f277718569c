"""One member of a namespace: objects and registers together, in a folder (`device`) or a bucket (`bucket`).

The package imports `base`, `local`, `remote` and `registers`. Start with `device`.
"""
