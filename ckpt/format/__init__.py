"""The format on disk: JSON records, the manifest, packs of blocks, codecs, digests and signatures.

docs/reference/format.md is the specification, and this package follows it byte by byte.

Guarantees: any changed byte of a record or a manifest is found when it is read, and the memory that a reader allocates has a
limit that follows from the length of the file. Used by `block_io` and the packages above it; it imports `state` and `support`.
Start with `manifest`, then `json_records`.
"""
