"""Stores behind another system's client: object stores (S3, Google Cloud Storage, Azure) and any fsspec URL.

Each says what its server can guarantee, such as a put that fails where the object exists. They import `base`. Start with
`object_store`.
"""
