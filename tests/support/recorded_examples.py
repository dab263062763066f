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


class _Task:
    """The turns of a browser task: what the model read and wrote, and when."""

    def __init__(self, images: Path | None, num_turns: int, words: int, size: tuple[int, int], seed: int) -> None:
        self.images, self.num_turns, self.words, self.size, self.seed = images, num_turns, words, size, seed
        # From this turn on a summary takes the place of the history.
        self.second = num_turns * 2 // 3 if num_turns >= 6 else num_turns
        self.writer = _Writer(seed)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You use a browser. Answer with one tool call."},
            {"role": "user", "content": "Open the item that the shop has most of.\nThen stop."},
        ]
        self.turns: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = [
            {"at_s": 0.8, "kind": "admitted", "reason": "probe of its group; projected 900 tokens", "rank": "rollout:0"}
        ]
        self.clock_s, self.cached = 1.2, 0
        self.writer.say("<system> You use a browser. Answer with one tool call. <end> <user> Open the item that")
        self.writer.say("the shop has most of.")
        self.writer.add("\n")
        self.writer.say("Then stop. <end> <assistant> ")
        for turn in range(num_turns):
            self.call(turn)
            self.observe(turn)

    def call(self, turn: int) -> None:
        if turn == self.second:
            self.writer.begin()
            self.writer.say("<system> You use a browser. Here is a summary of what happened so far. <end> <assistant> ")
            self.cached = 6
        version = 4 if turn < self.num_turns // 2 else 5
        prompt = self.writer.length
        completion = self.writer.say(REPLY.format(n=turn + 1), version)
        paused_s = 3.5 if turn % 3 == 2 else 0.0
        if paused_s:
            reason = f"needs {prompt + 32} tokens; 1,890 of 1,920 are used, 3 calls wait"
            self.events.append({"at_s": self.clock_s + 0.01, "kind": "paused", "reason": reason})
            fits = {"kind": "resumed", "reason": f"fits after {paused_s} s", "rank": "rollout:0"}
            self.events.append({"at_s": self.clock_s + paused_s, **fits})
        held_s, engine_s, context = paused_s + 0.05, 0.4 + 0.02 * turn, prompt + completion
        self.turns.append(
            {"turn": turn, "call_s": self.clock_s, "held_s": held_s, "engine_s": engine_s,
             "end_s": self.clock_s + held_s + engine_s, "prompt_tokens": prompt, "completion_tokens": completion,
             "cached_tokens": self.cached, "image_tokens": IMAGE_TOKENS * len(self.writer.segments[-1]["images"]),
             "context_tokens": context, "predicted_tokens": 900 + 3 * turn, "budget_tokens": 1920,
             "usage_tokens": 1500, "rank": "rollout:0", "model_version": version, "finish_reason": "stop",
             "reason": "1500 of 1920 tokens used with it"}
        )  # fmt: skip
        self.clock_s += held_s + engine_s + 1.1
        self.cached = context

    def observe(self, turn: int) -> None:
        call = {"id": f"call-{turn}", "type": "function"}
        call["function"] = {"name": "click", "arguments": json.dumps({"item": turn + 1, "button": "left"})}
        thought = f"The page shows a list; item {turn + 1} is the one. I click it."
        reply = {"role": "assistant", "content": f"I open item {turn + 1}.", "tool_calls": [call]}
        self.messages.append(reply | {"reasoning_content": thought})
        seen = " ".join(f"line{index}" for index in range(self.words))
        content: list[dict[str, Any]] = [{"type": "text", "text": f"Item {turn + 1} is open.\n{seen}"}]
        if self.images is not None:
            digest = ImageStore(self.images).put(png(*self.size, shade=turn * 29 + self.seed))
            content.append({"type": "image", "digest": digest})
        self.messages.append({"role": "tool", "tool_call_id": f"call-{turn}", "content": content})
        if turn + 1 in (self.second, self.num_turns):
            return
        self.writer.say(f"<tool> Item {turn + 1} is open.")
        self.writer.add("\n")
        self.writer.say(seen)
        if self.images is not None:
            self.writer.image(content[-1]["digest"])
        self.writer.say("<end> <assistant> ")


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
    task = _Task(images, num_turns, words, size, seed)
    return {
        "format": 1, "run": "shop", "uid": "train/17/3", "group": "train/17", "member": 3, "kind": "train",
        "attempt": 1, "earlier_attempts": [{"attempt": 0, "outcome": "infrastructure", "error": "the worker is gone"}],
        "environment": "shop", "task": {"site": "items", "num_items": 12}, "seed": 1017, "split": "train",
        "temperature": 1.0, "outcome": "completed", "reward": 0.75, "error": "", "metrics": {"clicks": num_turns},
        "num_turns": num_turns, "rewards": [None] * (num_turns - 1) + [0.75], "started_at": "2026-03-01T10:00:00Z",
        "duration_s": task.clock_s, "end_version": 6, "max_context_tokens": 4096, "messages": task.messages,
        "turns": task.turns, "events": task.events, "segments": task.writer.segments, "left_out": [],
    }  # fmt: skip
