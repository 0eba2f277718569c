"""Files of a namespace: written in pieces to several members, read back from any that answer, every cell verified.

It imports `records` and what is below. Start with `namespace`, then `writer` and `reader`.
"""
