"""Where the time of a run went, second by second, and what a simulated run would lose to failures.

It imports `policy`. Start with `ledger`.
"""
