"""Appends the next entries of the run log. Each agent has a coordinator, and one of them leads.

This package imports `run_log` and `policy`. Start with `coordinator`. `transitions` computes the entries, as pure functions.
"""
