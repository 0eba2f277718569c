"""All steps of one run under one URL: which steps exist, what they contain, which are kept, and who may write.

Guarantees: a committed step is complete or is reported as damaged; two writers never mix their steps; no file is deleted
because a record could not be read. Used by `saving`, `loading` and the packages above them; it imports `block_io`, `groups` and
the packages below them. Start with `repository`, then `writer_lease` and `retention`.
"""
