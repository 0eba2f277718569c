"""Which members store a file, and with how much redundancy: rendezvous hashing, copies, erasure codes.

Guarantees: all decisions are pure functions, so every client computes the same. Used by `cluster` and the packages above it; it
imports nothing else of the aggregator. Start with `rendezvous_hash`.
"""
