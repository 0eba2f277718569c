"""The format on disk: JSON records, the manifest, packs of blocks, codecs, digests and signatures.

docs/reference/format.md is the specification, and this package follows it byte by byte. Any changed byte of a record or a
manifest is found when it is read. The memory that a reader allocates has a limit that follows from the length of the file. The
package imports `state` and `support`. Start with `manifest`, then `json_records`.
"""
