"""The running of a run: scheduler's shell, rollout, weight sync, evaluation, warm start and the train loop."""
