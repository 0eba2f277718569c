"""Keeping a namespace whole: finding and repairing damage, moving fragments, by hand or in the background.

It promises that nothing is deleted on the strength of something that could not be read. It imports `file_io` and what is below.
Start with `scrub`, then `repair` and `rebalance`.
"""
