"""The agent of one host: starts and watches the ranks that the run log assigns to it, and publishes reports.

Guarantees: a host that has lost contact with the others ends its ranks, since the others may continue without it. Used by
`tools`; it imports all of recovery except the simulator. Start with `agent_loop`, which calls the parts in order. `agent`
creates and closes the parts.
"""
