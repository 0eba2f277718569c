"""The maintenance of a namespace: scrub, repair and rebalance, on demand or in the background.

Guarantees: a record or a member that cannot be read never causes a deletion. Used by `tools`; it imports `file_io` and the
packages below it. Start with `scrub`, then `repair` and `rebalance`.
"""
