"""Decisions of the trainer: pure code without I/O, clock, randomness or logging; `now_s` is an argument."""
