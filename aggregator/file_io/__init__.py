"""Files of a namespace, written as stripes to several members and read back from those that answer.

Every cell that is read is verified. It imports `records` and the packages below. Start with `namespace`, then `writer` and
`reader`.
"""
