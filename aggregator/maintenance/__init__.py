"""The maintenance of a namespace: scrub, repair and rebalance, on demand or in the background.

It deletes nothing because of something that it could not read. It imports `file_io` and the packages below. Start with `scrub`,
then `repair` and `rebalance`.
"""
