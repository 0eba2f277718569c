"""Many members (nodes, directories, buckets) as one namespace of files.

It promises that an acknowledged file is read back as it was written while no more members fail than its redundancy tolerates.
A record or a member that it can't read never makes it delete anything. It imports `storage`; users reach it by ckpt:// URLs.

Start with `file_io.namespace`; docs/reference/namespace.md describes the whole.
"""
