"""P(t): which waiting call goes first.

Source: TideRL section 4.2, `P(t) = w1*I_eval + w2*G_completion + w3*I_active + w4*L_context`.
Deviation: lexicographic tiers by default, with the task's order before long context; L_context is divided by the
longest context; age promotes (bounded wait).
"""

from __future__ import annotations

from tide_trainer.scheduling.settings import CtbSettings

Key = tuple[float, ...]


def waiting_key(
    settings: CtbSettings,
    *,
    is_eval: bool,
    completion: float,
    active: bool,
    order_key: int,
    context_tokens: int,
    starved_since_s: float | None,
) -> Key:
    """A sort key: the smallest goes first.

    Args:
        settings: `priority`, `weights`, `max_context_tokens`.
        is_eval: I_eval.
        completion: G_completion, finished siblings / siblings, 0 to 1.
        active: I_active, the task's context is on the rank (it is not paused).
        order_key: of the task; inside a tier the smallest goes first (the earliest reserved buffer).
        context_tokens: L_context before normalisation.
        starved_since_s: when its wait began, if it has waited longer than `max_wait_s`; else None.

    Returns:
        tiers: evaluation, then starved by age, then group completion, active, order, long context. weighted: starved by
        age, then the sum, then order.
    """
    context = min(1.0, context_tokens / settings.max_context_tokens)
    if settings.priority == "weighted":
        if starved_since_s is not None:
            return (0.0, starved_since_s)
        weights = settings.weights
        score = (
            weights.evaluation * is_eval
            + weights.group_completion * completion
            + weights.active * active
            + weights.context * context
        )
        return (1.0, -score, order_key)
    if starved_since_s is not None:
        return (-float(is_eval), 0.0, starved_since_s)
    return (-float(is_eval), 1.0, -completion, -float(active), order_key, -context)
