"""The memory tier of a run: storage nodes in the memory of its hosts, which outlive the ranks.

This package imports `ranks` and the packages below it. Start with `memory_nodes`.
"""
