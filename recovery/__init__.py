"""Brings a training job back: agents that start ranks and notice what goes wrong, a log that says what is done about it."""
