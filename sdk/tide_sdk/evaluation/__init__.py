"""Evaluations: a folder with a manifest, one line for each play, a summary and a report.

    tasks, settings -> manifest.json      plays -> results.jsonl -> summary.json, report.html

`tasks` says what is played, `folder` holds the files, `carry_out` plays what is missing, `summary` has the figures and
`report` the page; `session` is `tide-env eval`. The trainer's evaluation of a checkpoint writes the same files.
"""
