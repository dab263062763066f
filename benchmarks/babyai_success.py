"""Sampled success of saved models on held-out BabyAI seeds, in plain torch: one yardstick for every system compared.

A model is measured after the run that made it, in a process of its own, so that no measurement takes time or memory
from a run. All episodes advance together, with a kept KV cache; a turn ends at the end token or after `max_new_tokens`,
as in the quickstart. Prints the successes as JSON, up to the first that reaches the target.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tide_environments.babyai.game import Game

SAMPLING_SEED = 1


class Yardstick:
    """Measures weights of one model shape on the configured held-out seeds.

    Args:
        folder: the model folder: its shape and tokenizer.
        settings: the resolved quickstart.
        num_episodes: held-out seeds, from `tasks.eval_seed` on.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], num_episodes: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.eval()
        self._end = self._tokenizer.eos_token_id
        self._settings = settings
        first = settings["tasks"]["eval_seed"]
        self._seeds = range(first, first + num_episodes)

    def success(self, weights: Path) -> float:
        """The share of held-out episodes that succeed, sampled at temperature 1; the same weights give the same."""
        self._model.load_state_dict(load_file(weights))
        parameters = self._settings["tasks"]["parameters"]
        games = [Game(parameters["level"], seed, max_turns=parameters["max_turns"]) for seed in self._seeds]
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(SAMPLING_SEED)
            return sum(self._play(games)) / len(games)

    def _play(self, games: Sequence[Game]) -> Iterator[bool]:
        batch = _Batch(self._model, len(games))
        live = list(games)
        texts = [f"<user>{game.text}<assistant>" for game in live]
        while live:
            words = self._turn(batch, texts)
            played = [game.act(word) for game, word in zip(live, words, strict=True)]
            over = [one.terminated or one.truncated for one in played]
            yield from (one.success for one, ended in zip(played, over, strict=True) if ended)
            kept = [row for row, ended in enumerate(over) if not ended]
            live = [live[row] for row in kept]
            texts = [f"<end><user>{played[row].text}<assistant>" for row in kept]
            if live:
                batch.keep(kept)

    def _turn(self, batch: _Batch, texts: Sequence[str]) -> list[str]:
        """Reads a text in each episode and samples a reply; the end token is left for the next text to begin with."""
        logits = batch.feed(self._tokenizer(list(texts), add_special_tokens=False)["input_ids"])
        replies: list[list[int]] = [[] for _ in texts]
        limit = self._settings["rollout"]["max_new_tokens"]
        for number in range(limit):
            if number:
                logits = batch.feed([reply[-1:] if len(reply) == number else [] for reply in replies])
            sampled = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0].tolist()
            for reply, token in zip(replies, sampled, strict=True):
                if len(reply) == number and token != self._end:
                    reply.append(token)
        # A reply that was cut off has its last token unread.
        batch.unread = [reply[-1:] if len(reply) == limit else [] for reply in replies]
        return [self._tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]


class _Batch:
    """Episodes that share a padded KV cache."""

    def __init__(self, model: Any, num_rows: int) -> None:
        self._model = model
        self._cache = DynamicCache()
        self._mask = torch.zeros(num_rows, 0, dtype=torch.long)
        self.unread: list[list[int]] = [[] for _ in range(num_rows)]

    def feed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Reads further ids [B, any length]; logits [B, V] behind the last of each, undefined where there are none."""
        rows = [[*before, *new] for before, new in zip(self.unread, ids, strict=True)]
        self.unread = [[] for _ in rows]
        width = max(1, *(len(row) for row in rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        before = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, mask], 1)
        positions = (before + mask.cumsum(1) - 1).clamp(min=0)
        found = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves the other episodes behind."""
        index = torch.tensor(rows)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
        self.unread = [self.unread[row] for row in rows]


def main() -> None:
    """Measures the named weights in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=Path, required=True, help="JSON of the resolved configuration")
    parser.add_argument("--model", type=Path, required=True, help="model folder: the shape and the tokenizer")
    parser.add_argument("--episodes", type=int, required=True, help="held-out seeds")
    parser.add_argument("--target", type=float, default=1.0, help="success after which the rest is left out")
    parser.add_argument("--out", type=Path, required=True, help="takes the list of successes")
    parser.add_argument("weights", type=Path, nargs="+")
    arguments = parser.parse_args()
    # The operations are so small that a second thread only costs.
    torch.set_num_threads(1)
    settings = json.loads(arguments.settings.read_text(encoding="utf-8"))
    yardstick = Yardstick(arguments.model, settings, arguments.episodes)
    found: list[float] = []
    for weights in arguments.weights:
        found.append(yardstick.success(weights))
        if found[-1] >= arguments.target:
            break
    arguments.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
