"""Whole conversations as supervised sequences, by the capture that reinforcement learning uses."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from tide_trainer.router.renderer import Renderer
from tide_trainer.router.replies import Reply
from tide_trainer.router.sessions import Capture
from tide_trainer.types import Sequence


def supervised_sequences(renderer: Renderer, conversations: Seq[Seq[Mapping[str, Any]]]) -> list[Sequence]:
    """One sequence per segment; only the replies and the token that ends each train.

    The ids are made by the router's own capture, so that they are those of reinforcement learning. A reply with tool
    calls is what the chat template writes for it.

    Raises:
        ValueError: the template writes something else before a reply with calls than it asks for one with.
    """
    stop = renderer.stop_token_ids[:1]
    sequences: list[Sequence] = []
    for messages in conversations:
        capture = Capture(renderer)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                turn = capture.plan(messages[:place])
                has_calls = bool(message.get("tool_calls"))
                text = _written(renderer, turn.text, messages[: place + 1]) if has_calls else str(message["content"])
                ids = (*renderer.encode_after(text), *stop)
                capture.commit(turn, Reply(ids, (0.0,) * len(ids), text, "tool_calls" if has_calls else "stop"), 0)
        sequences.extend(Sequence(s.token_ids, s.sampled, s.logprobs, 1.0, s.images) for s in capture.segments())
    return sequences


def _written(renderer: Renderer, prompt: str, messages: Seq[Mapping[str, Any]]) -> str:
    """What the template writes for the last message, up to the stop token."""
    text = renderer.render(messages, add_generation_prompt=False)
    body, stop, _ = text[len(prompt) :].rpartition(renderer.token_text(renderer.stop_token_ids[0]))
    if not text.startswith(prompt) or not stop:
        raise ValueError("the chat template shows a reply with tool calls in another way than it asks for one")
    return body
