"""`tide-env play`: a person plays an environment in the terminal.

`typed` says what a line means, `shown` what is shown of an environment's words, `session` plays.
"""
