"""Made-up recorded trajectories: a browser task with screenshots, tool calls, pauses, two versions and a break."""

from __future__ import annotations

import json
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from tide_trainer.images import ImageStore

IMAGE_TOKENS = 96
REPLY = "<think>The page shows a list; item {n} is the one. I click it.</think> I open item {n}. <call> click {n} <end>"


def png(width: int, height: int, shade: int) -> bytes:
    """A picture of stripes."""
    rows = b"".join(
        b"\0" + b"".join(bytes(((x * 5 + shade) % 256, (y * 7) % 256, shade % 256)) for x in range(width))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class _Writer:
    """Segments that grow by words, one id a word."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.segments: list[dict[str, Any]] = []
        self.ids: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        self.segments.append(
            {"token_ids": [], "texts": [], "sampled": [], "logprobs": [], "versions": [], "images": []}
        )

    @property
    def length(self) -> int:
        return len(self.segments[-1]["token_ids"])

    def add(self, word: str, version: int = -1) -> None:
        here = self.segments[-1]
        logprob = math.log(min(0.999, max(0.003, self.random.gauss(0.8, 0.35)))) if version >= 0 else None
        row = (self.ids.setdefault(word, len(self.ids) + 3), word, version >= 0, logprob, version)
        for name, value in zip(("token_ids", "texts", "sampled", "logprobs", "versions"), row, strict=True):
            here[name].append(value)

    def say(self, text: str, version: int = -1) -> int:
        words = text.split(" ")
        for index, word in enumerate(words):
            self.add(word + (" " if index + 1 < len(words) else ""), version)
        return len(words)

    def image(self, digest: str) -> None:
        here = self.segments[-1]
        here["images"].append({"start": self.length, "num_tokens": IMAGE_TOKENS, "digest": digest})
        for _ in range(IMAGE_TOKENS):
            self.add("<pad>")


def browser_task(
    images: Path | None = None,
    *,
    num_turns: int = 6,
    words: int = 12,
    size: tuple[int, int] = (160, 100),
    seed: int = 3,
) -> dict[str, Any]:
    """One trajectory as its file holds it.

    Args:
        images: an image store that gets a screenshot a turn; None: no images.
        num_turns: calls of the model; the last third is in a second segment if there are at least 6.
        words: words of an observation.
        size: of a screenshot.
        seed: of everything random.
    """
    writer = _Writer(seed)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You use a browser. Answer with one tool call."},
        {"role": "user", "content": "Open the item that the shop has most of.\nThen stop."},
    ]
    writer.say(
        "<system> You use a browser. Answer with one tool call. <end> <user> Open the item that the shop has most of."
    )
    writer.add("\n")
    writer.say("Then stop. <end> <assistant> ")
    turns: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = [
        {"at_s": 0.8, "kind": "admitted", "reason": "probe of its group; projected 900 tokens", "rank": "rollout:0"}
    ]
    clock_s, cached, context = 1.2, 0, 0
    for turn in range(num_turns):
        if num_turns >= 6 and turn == num_turns * 2 // 3:
            writer.begin()
            writer.say("<system> You use a browser. Here is a summary of what happened so far. <end> <assistant> ")
            cached = 6
        version = 4 if turn < num_turns // 2 else 5
        prompt = writer.length
        completion = writer.say(REPLY.format(n=turn + 1), version)
        paused_s = 3.5 if turn % 3 == 2 else 0.0
        if paused_s:
            reason = f"needs {prompt + 32} tokens; 1,890 of 1,920 are used, 3 calls wait"
            events.append({"at_s": clock_s + 0.01, "kind": "paused", "reason": reason})
            fits = {"kind": "resumed", "reason": f"fits after {paused_s} s", "rank": "rollout:0"}
            events.append({"at_s": clock_s + paused_s, **fits})
        held_s, engine_s = paused_s + 0.05, 0.4 + 0.02 * turn
        context = prompt + completion
        turns.append(
            {"turn": turn, "call_s": clock_s, "held_s": held_s, "engine_s": engine_s,
             "end_s": clock_s + held_s + engine_s, "prompt_tokens": prompt, "completion_tokens": completion,
             "cached_tokens": cached, "image_tokens": IMAGE_TOKENS * len(writer.segments[-1]["images"]),
             "context_tokens": context, "predicted_tokens": 900 + 3 * turn, "budget_tokens": 1920,
             "usage_tokens": 1500, "rank": "rollout:0", "model_version": version, "finish_reason": "stop",
             "reason": "1500 of 1920 tokens used with it"}
        )  # fmt: skip
        clock_s += held_s + engine_s + 1.1
        cached = context
        call = {"id": f"call-{turn}", "type": "function"}
        call["function"] = {"name": "click", "arguments": json.dumps({"item": turn + 1, "button": "left"})}
        messages.append(
            {"role": "assistant", "content": f"I open item {turn + 1}.", "tool_calls": [call],
             "reasoning_content": f"The page shows a list; item {turn + 1} is the one. I click it."}
        )  # fmt: skip
        last = turn + 1 == num_turns or (num_turns >= 6 and turn + 1 == num_turns * 2 // 3)
        seen = " ".join(f"line{index}" for index in range(words))
        content: list[dict[str, Any]] = [{"type": "text", "text": f"Item {turn + 1} is open.\n{seen}"}]
        if images is not None:
            digest = ImageStore(images).put(png(*size, shade=turn * 29 + seed))
            content.append({"type": "image", "digest": digest})
        if not last:
            writer.say(f"<tool> Item {turn + 1} is open.")
            writer.add("\n")
            writer.say(seen)
            if images is not None:
                writer.image(digest)
            writer.say("<end> <assistant> ")
        messages.append({"role": "tool", "tool_call_id": f"call-{turn}", "content": content})
    return {
        "format": 1, "run": "shop", "uid": "train/17/3", "group": "train/17", "member": 3, "kind": "train",
        "attempt": 1, "earlier_attempts": [{"attempt": 0, "outcome": "infrastructure", "error": "the worker is gone"}],
        "environment": "shop", "task": {"site": "items", "num_items": 12}, "seed": 1017, "split": "train",
        "temperature": 1.0, "outcome": "completed", "reward": 0.75, "error": "", "metrics": {"clicks": num_turns},
        "num_turns": num_turns, "rewards": [None] * (num_turns - 1) + [0.75], "started_at": "2026-03-01T10:00:00Z",
        "duration_s": clock_s, "end_version": 6, "max_context_tokens": 4096, "messages": messages, "turns": turns,
        "events": events, "segments": writer.segments, "left_out": [],
    }  # fmt: skip
