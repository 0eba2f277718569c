"""Where the pieces of a file go, and how often each is stored: rendezvous hashing, copies, erasure codes. Pure.

It imports nothing else of the aggregator. Start with `rendezvous_hash`.
"""
