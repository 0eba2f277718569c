"""Stores on remote systems: object stores (S3, Google Cloud Storage, Azure) and any fsspec URL.

Guarantees: the docstring of each file states what the server ensures, such as a put that fails if the object exists. Used by
`member` and the packages above it; it imports `base`. Start with `object_store`.
"""
