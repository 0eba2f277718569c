"""Stores in folders of this machine: a directory with direct I/O, and a directory in shared memory.

They promise that nothing is visible before it is durable, as far as the file system can promise that. They import `base`. Start
with `directory`.
"""
