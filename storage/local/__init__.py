"""Stores in folders of this machine: a directory with direct I/O, and a directory in shared memory.

Guarantees: nothing is visible before it is durable, as far as the file system can promise that. Used by `member` and the
packages above it; it imports `base`. Start with `directory`.
"""
