"""Registers: the small records of a member, each one an acceptor of a consensus among members.

A register makes an accepted value durable before it answers. This package imports `storage.base`. Start with `base`.
"""
