"""The agent of one host: starts the ranks that the log assigns to it, watches them, reports, and leaves when the run is over.

It imports all of recovery but `goodput`'s simulator. Start with `agent_loop`, which calls the parts in order; `agent` makes and
closes them.
"""
