"""Pure functions that decide about a run: after a failure, about a hung rank, after a bad loss.

Guarantees: they use no clock, disk or network, so the coordinator and the simulator call the same code. Only `HangLimits` and
`PaceMeter` have a state: what they have learned. Used by all other packages of recovery; it imports none of them. Start with
`failure` and `restart_decision`.
"""
