"""The router: one OpenAI-compatible endpoint per task, between agents and rollout ranks.

    agent --HTTP--> app -> calls --(call)--> scheduler in the main process --(grant)--> engine of a rank -> app -> agent
                     |
                     sessions: exactly the ids that the engine saw and sampled

It decides nothing: a call waits until the main process grants it a rank.
"""
