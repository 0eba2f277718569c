"""How a device is read best: learned while it is read, from what the reads themselves show.

A disk, a cloud volume and a bucket differ in how many requests they need at a time and how long these should be. Nothing of
that is assumed. `search.py` decides, as a pure function of measurements. `tuner.py` lets the threads of a load use what it
decides, and measures. `learned_choices.py` keeps the result in the user's cache folder, where the next process starts.

Start reading at `search.py`.
"""
