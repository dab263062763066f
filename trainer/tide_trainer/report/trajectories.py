"""Sample trajectories for the report: chat turns and tokens, before and after training. Nothing in them is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_trainer.report.formats import MISSING, number

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_PAIRS = 20
MAX_TURNS = 200
MAX_TEXT = 8_000
MAX_TOKENS = 8_000
EDGES = (0.9, 0.5, 0.1, 0.01)
LEGEND = ("90% or more", "50 to 90%", "10 to 50%", "1 to 10%", "below 1%")


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its text, the class of its probability (0 likely to 4 unlikely, None if not sampled), a hint."""

    text: str
    level: int | None
    hint: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat message; `tokens` are its sampled tokens where they could be matched."""

    role: str
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory."""

    when: str
    uid: str
    seed: str
    reward: str
    won: bool
    outcome: str
    num_turns: str
    turns: tuple[Turn, ...]
    tokens: tuple[Token, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Pair:
    """The same problem before and after training; one side may be missing."""

    title: str
    before: Sample | None
    after: Sample | None


def read_pairs(path: Path) -> tuple[list[Pair], str]:
    """The trajectories of samples.json in pairs, and a sentence that says what is missing (empty if nothing is)."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return [], f"{path.name} is larger than {MAX_FILE_BYTES >> 20} MiB and was not read."
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return [], "The run kept no sample trajectories."
    except (OSError, ValueError, RecursionError) as error:
        return [], f"{path.name} cannot be read: {error}"
    if not isinstance(data, list):
        return [], f"{path.name} is not a list of trajectories."
    samples = [_sample(item) for item in data if isinstance(item, Mapping)]
    return pairs(samples), "" if samples else "The run kept no sample trajectories."


def pairs(samples: Sequence[Sample]) -> list[Pair]:
    """Puts samples of one problem side by side, in the order of their first appearance."""
    before: dict[str, list[Sample]] = {}
    after: dict[str, list[Sample]] = {}
    for sample in samples:
        (after if sample.when == "after" else before).setdefault(sample.seed or sample.uid, []).append(sample)
    found: list[Pair] = []
    for key in dict.fromkeys([*before, *after]):
        left, right = before.get(key, []), after.get(key, [])
        for index in range(max(len(left), len(right))):
            one = left[index] if index < len(left) else None
            two = right[index] if index < len(right) else None
            found.append(Pair(f"Seed {key}", one, two))
    return found[:MAX_PAIRS]


def _sample(item: Mapping[str, Any]) -> Sample:
    raw = item.get("tokens")
    tokens = [token for token in raw[:MAX_TOKENS] if isinstance(token, Mapping)] if isinstance(raw, list) else []
    reward = number(item, "reward")
    turns = number(item, "turns")
    seed = item.get("seed")
    versions = sorted({int(v) for token in tokens if (v := number(token, "version")) is not None and v >= 0})
    return Sample(
        when="after" if item.get("when") == "after" else "before",
        uid=str(item.get("uid") or ""),
        seed="" if seed is None else str(seed),
        reward=MISSING if reward is None else f"{reward:.2f}",
        won=reward is not None and reward > 0,
        outcome=str(item.get("outcome") or "unknown"),
        num_turns=MISSING if turns is None else f"{turns:.0f}",
        turns=_turns(item.get("messages"), tokens),
        tokens=tuple(_token(token) for token in tokens),
        version=", ".join(str(version) for version in versions[:4]),
    )


def _turns(messages: Any, tokens: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    if not isinstance(messages, list):
        return ()
    spoken = [message for message in messages if isinstance(message, Mapping)]
    num_replies = sum(message.get("role") == "assistant" for message in spoken)
    replies = _sampled_runs(tokens)
    matched = iter(replies if len(replies) == num_replies else ())
    turns: list[Turn] = []
    for message in spoken[:MAX_TURNS]:
        role = str(message.get("role") or "unknown")
        mine = next(matched, []) if role == "assistant" else []
        turns.append(Turn(role, _shortened(_text(message)), tuple(_token(token) for token in mine)))
    if len(spoken) > MAX_TURNS:
        turns.append(Turn("note", f"{len(spoken) - MAX_TURNS} more messages are not shown."))
    return tuple(turns)


def _sampled_runs(tokens: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The stretches of sampled tokens, one for each reply of the model."""
    runs: list[list[Mapping[str, Any]]] = []
    before = False
    for token in tokens:
        sampled = token.get("sampled") is True
        if sampled and not before:
            runs.append([])
        if sampled:
            runs[-1].append(token)
        before = sampled
    return runs


def _token(token: Mapping[str, Any]) -> Token:
    text = str(token.get("text") if token.get("text") is not None else "")[:MAX_TEXT]
    logprob, version = number(token, "logprob"), number(token, "version")
    if token.get("sampled") is not True:
        return Token(text, None, "not sampled")
    if logprob is None:
        return Token(text, None, "sampled, log-prob not recorded")
    share = math.exp(min(0.0, logprob))
    level = sum(share < edge for edge in EDGES)
    made_by = "" if version is None else f", model version {version:.0f}"
    return Token(text, level, f"log-prob {logprob:.3f}, probability {100 * share:.3g}%{made_by}")


def _text(message: Mapping[str, Any]) -> str:
    """The message in words; images and other parts are named, never shown."""
    content = message.get("content")
    parts: list[str] = []
    if isinstance(content, str):
        parts.append(content)
    elif isinstance(content, list):
        for part in content:
            kind = str(part.get("type") or "unknown part") if isinstance(part, Mapping) else "unknown part"
            parts.append(str(part.get("text") or "") if kind == "text" else f"[{kind.removesuffix('_url')}]")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(f"{function.get('name')}({function.get('arguments') or ''})")
    return "\n".join(parts)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"
