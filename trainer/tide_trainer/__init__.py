"""Scheduler, router, rollout engines and training backends of TideRL."""
