"""What lies on disk: JSON records, the manifest, packs of blocks, codecs, digests and signatures.

docs/reference/format.md is the specification, and this package follows it byte by byte. It promises that a record or manifest
that was changed is found, and that none of them makes a reader allocate more than the bytes that are there can fill. It imports
`state` and `support`. Start with `manifest`, then `json_records`.
"""
