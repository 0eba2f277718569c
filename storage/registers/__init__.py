"""Registers: the small records of a member, each one an acceptor of a consensus among members.

Guarantees: a register makes an accepted value durable before it answers. Used by `member` and the packages above it; it imports
`base`. Start with `base`.
"""
