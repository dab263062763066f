"""The trainer's state in SQL: runs, groups, trajectories, train steps, rank roles."""
