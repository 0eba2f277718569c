"""Many members (nodes, directories, buckets) as one namespace of files.

Guarantees: an acknowledged file is read back as it was written while no more members fail than its redundancy tolerates; a
record or a member that cannot be read never causes a deletion. Used through ckpt:// URLs; it imports `storage`.

Start with `file_io.namespace`; docs/reference/namespace.md describes the whole.
"""
