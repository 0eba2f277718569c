"""Registers: the small records of a member, each one an acceptor of a consensus among members.

A register promises that what it has accepted is durable before it answers. It imports `storage.base`. Start with `base`.
"""
