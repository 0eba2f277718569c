"""How many requests a device gets at a time, and how long they are: learned from the reads of each load.

A disk, a cloud volume and a bucket differ in how many requests they need at a time and how long these should be. Nothing of
that is assumed. `request_search` decides, as a pure function of measurements. `measured_reads` lets the threads of a load use
what it decides, and measures. `learned_choices` keeps the result in the user's cache folder, where the next process starts.

Guarantees: a choice changes how long a load takes, and never what it returns. Used by `ckpt.block_io`; it imports `base`. Start
with `request_search`.
"""
