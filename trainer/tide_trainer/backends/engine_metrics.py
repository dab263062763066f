"""An engine's live numbers as Prometheus text, for dashboards; the trainer reads `/tide/stats`. Pure."""

from __future__ import annotations

from tide_trainer import types
from tide_trainer.engine_client import EngineHealth


def prometheus_text(stats: types.EngineStats, health: EngineHealth) -> str:
    """The text format 0.0.4. What the engine cannot read is left out, so that an alert on absence fires."""
    used, size = stats.kv_used_tokens, health.kv_tokens
    free = size - used if used >= 0 and size > 0 else None
    rows: list[tuple[str, str, str, int | None]] = [
        ("serving", "gauge", "1 while proven weights are loaded", int(health.serving)),
        ("model_version", "gauge", "model version of the weights", stats.version),
        ("running_requests", "gauge", "requests that hold a place in the batch", _known(stats.num_running)),
        ("waiting_requests", "gauge", "requests that wait for one", _known(stats.num_waiting)),
        ("kv_size_tokens", "gauge", "tokens that the KV cache holds", size),
        ("kv_used_tokens", "gauge", "tokens of the KV blocks that requests hold", _known(used)),
        ("kv_free_tokens", "gauge", "tokens of the other KV blocks, cached ones included", free),
        ("prompt_tokens_total", "counter", "prompt tokens of finished requests", stats.prompt_tokens),
        ("cached_tokens_total", "counter", "of these, tokens from the prefix cache", stats.cached_tokens),
        ("generated_tokens_total", "counter", "sampled tokens of finished requests", stats.generated_tokens),
        ("preemptions_total", "counter", "requests whose blocks the engine took back", stats.num_preemptions),
    ]
    lines: list[str] = []
    for name, kind, told, value in rows:
        if value is not None:
            whole = f"tide_engine_{name}"
            lines += [f"# HELP {whole} {told}", f"# TYPE {whole} {kind}", f"{whole} {value}"]
    return "\n".join(lines) + "\n"


def _known(value: int) -> int | None:
    return value if value >= 0 else None
