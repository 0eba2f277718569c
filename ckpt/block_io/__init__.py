"""Bytes in and out: which byte ranges a load reads, how blocks are read and verified, and the memory they pass through.

It promises that no byte reaches a destination before its block was verified. It imports `format` and what is below. Start with
`read_plan`, then `block_reader`.
"""
