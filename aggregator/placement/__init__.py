"""Which members store a file, and with how much redundancy: rendezvous hashing, copies, erasure codes.

All decisions are pure functions. It imports nothing else of the aggregator. Start with `rendezvous_hash`.
"""
