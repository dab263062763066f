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

    The ids are made by the router's own capture, so that they are those of reinforcement learning.
    """
    stop = renderer.stop_token_ids[:1]
    sequences: list[Sequence] = []
    for messages in conversations:
        capture = Capture(renderer)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                content = str(message["content"])
                ids = (*renderer.encode_after(content), *stop)
                reply = Reply(ids, (0.0,) * len(ids), content, "stop")
                capture.commit(capture.plan(messages[:place]), reply, 0)
        sequences.extend(Sequence(s.token_ids, s.sampled, s.logprobs, 1.0, s.images) for s in capture.segments())
    return sequences
