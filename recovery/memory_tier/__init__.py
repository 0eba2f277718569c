"""The memory tier of a run: storage nodes in the memory of its hosts, which outlive the ranks.

It imports `ranks` and what is below. Start with `memory_nodes`.
"""
