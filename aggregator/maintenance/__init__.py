"""The maintenance of a namespace: scrub, repair and rebalance, on demand or in the background.

A record or a member that it can't read never makes it delete anything. It imports `file_io` and the packages below. Start with
`scrub`, then `repair` and `rebalance`.
"""
