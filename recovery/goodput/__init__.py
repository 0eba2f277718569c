"""The goodput ledger of a run, which accounts for every second, and a simulator of runs with failures.

This package imports `policy`. Start with `ledger`.
"""
