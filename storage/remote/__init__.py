"""Stores on remote systems: object stores (S3, Google Cloud Storage, Azure) and any fsspec URL.

The docstring of each file states what the server guarantees, such as a put that fails if the object exists. The package imports
`base`. Start with `object_store`.
"""
