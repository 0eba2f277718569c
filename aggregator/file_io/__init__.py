"""Files of a namespace, written as stripes to several members and read back from those that answer.

Guarantees: every cell that is read is verified. Used by `maintenance`, `interfaces` and `tools`; it imports `records` and the
packages below it. Start with `namespace`, then `writer` and `reader`.
"""
