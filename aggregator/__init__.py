"""Many members (nodes, folders, buckets) as one namespace of files.

It promises that a file which was acknowledged is read back as it was written while fewer members fail than its redundancy
tolerates, and that nothing is deleted on the strength of something that could not be read. It imports `storage`; users reach
it by ckpt:// URLs.

Start with `file_io.namespace`; docs/reference/namespace.md describes the whole.
"""
