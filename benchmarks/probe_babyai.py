"""Plain-torch probe of the quickstart's learning: no servers, the game in this process, one thread.

    python benchmarks/probe_babyai.py --seed 1 --eta 0

Warm start on the expert's demonstrations until sampled success is in the band, then GRPO. Prints one line per train
step and, last, a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_model, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tide_environments.babyai import words
from tide_environments.babyai.game import Game
from tide_trainer.backends.tiny_model import TinyModel, make_tiny_model

EVAL_SEED, WARM_SEED, TRAIN_SEED = 1_000, 500_000, 1_000_000


@dataclass
class Episode:
    """One played episode: ids, which were sampled, their log-probs, and the result."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False
    turns: int = 0


class Player:
    """Samples episodes in one batch with a kept KV cache."""

    def __init__(self, model, tokenizer, level, max_turns, max_new):
        self.model, self.tok, self.level, self.max_turns, self.max_new = model, tokenizer, level, max_turns, max_new
        get = tokenizer.convert_tokens_to_ids
        self.user, self.assistant, self.end, self.pad = get("<user>"), get("<assistant>"), get("<end>"), get("<pad>")

    def observation_ids(self, text: str) -> list[int]:
        return [self.user, *self.tok.convert_tokens_to_ids(text.split()), self.assistant]

    @torch.no_grad()
    def play(self, seeds: list[int], temperature: float) -> list[Episode]:
        games = [Game(self.level, s, max_turns=self.max_turns) for s in seeds]
        episodes = [Episode() for _ in seeds]
        alive = list(range(len(seeds)))
        feed = {i: self.observation_ids(games[i].text) for i in alive}
        cache, mask = DynamicCache(), torch.zeros(len(seeds), 0, dtype=torch.long)
        for i in alive:
            self._append(episodes[i], feed[i], False, 0.0)
        while alive:
            replies: dict[int, list[int]] = {i: [] for i in alive}
            talking = list(alive)
            for _ in range(self.max_new):
                logits, mask = self._forward(alive, feed, cache, mask)
                logprobs = torch.log_softmax(logits.float(), -1)
                picks = (
                    logits.argmax(-1)
                    if temperature == 0
                    else torch.multinomial((logits.float() / temperature).softmax(-1), 1)[:, 0]
                )
                feed = {}
                still = []
                for row, i in enumerate(alive):
                    if i not in talking:
                        continue
                    pick = int(picks[row])
                    replies[i].append(pick)
                    self._append(episodes[i], [pick], True, float(logprobs[row, pick]))
                    feed[i] = [pick]
                    if pick != self.end:
                        still.append(i)
                talking = still
                if not talking:
                    break
            keep = []
            for row, i in enumerate(alive):
                word = self.tok.decode(replies[i], skip_special_tokens=True)
                played = games[i].act(word)
                episodes[i].turns += 1
                if played.terminated or played.truncated:
                    episodes[i].reward, episodes[i].success = played.reward, played.success
                    continue
                tail = self.observation_ids(played.text)
                if replies[i][-1] != self.end:
                    tail = [self.end, *tail]
                self._append(episodes[i], tail, False, 0.0)
                feed[i] = feed.get(i, []) + tail
                keep.append(row)
            if len(keep) < len(alive):
                rows = torch.tensor(keep, dtype=torch.long)
                alive = [alive[r] for r in keep]
                if alive:
                    cache.batch_select_indices(rows)
                    mask = mask[rows]
                feed = {i: feed[i] for i in alive}
        return episodes

    def _append(self, episode, ids, sampled, logprob):
        episode.ids += ids
        episode.sampled += [sampled] * len(ids)
        episode.logprobs += [logprob] * len(ids)

    def _forward(self, alive, feed, cache, mask):
        width = max(len(feed.get(i, [])) for i in alive)
        ids = torch.full((len(alive), width), self.pad)
        new = torch.zeros(len(alive), width, dtype=torch.long)
        for row, i in enumerate(alive):
            got = feed.get(i, [])
            if got:
                ids[row, width - len(got) :] = torch.tensor(got)
                new[row, width - len(got) :] = 1
        mask = torch.cat([mask, new], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                         use_cache=True, logits_to_keep=1)  # fmt: skip
        return out.logits[:, -1], mask


def rate(player, count, temperature, seed0=EVAL_SEED):
    played = player.play(list(range(seed0, seed0 + count)), temperature)
    return sum(e.success for e in played) / count, sum(e.turns for e in played) / count


def demonstrations(player, count):
    found = []
    for seed in range(WARM_SEED, WARM_SEED + count):
        game = Game(player.level, seed, max_turns=player.max_turns, expert=True)
        episode = Episode()
        player._append(episode, player.observation_ids(game.text), False, 0.0)
        while True:
            word = game.expert_action
            player._append(episode, [player.tok.convert_tokens_to_ids(word), player.end], True, 0.0)
            played = game.act(word)
            if played.terminated or played.truncated:
                break
            player._append(episode, player.observation_ids(played.text), False, 0.0)
        if played.success:
            found.append(episode)
    return found


def padded(episodes, advantages):
    width = max(len(e.ids) for e in episodes)
    ids = torch.zeros(len(episodes), width, dtype=torch.long)
    sampled = torch.zeros(len(episodes), width, dtype=torch.bool)
    old = torch.zeros(len(episodes), width)
    mask = torch.zeros(len(episodes), width, dtype=torch.long)
    for row, e in enumerate(episodes):
        n = len(e.ids)
        ids[row, :n], sampled[row, :n] = torch.tensor(e.ids), torch.tensor(e.sampled)
        old[row, :n], mask[row, :n] = torch.tensor(e.logprobs), 1
    return ids, mask, sampled, old, torch.tensor(advantages)[:, None]


def micro_batches(episodes, advantages, max_tokens):
    order = sorted(range(len(episodes)), key=lambda i: len(episodes[i].ids))
    batch, width = [], 0
    for i in order:
        width = max(width, len(episodes[i].ids))
        if batch and (len(batch) + 1) * width > max_tokens:
            yield [episodes[j] for j in batch], [advantages[j] for j in batch]
            batch, width = [], len(episodes[i].ids)
        batch.append(i)
    yield [episodes[j] for j in batch], [advantages[j] for j in batch]


def update(model, optimizer, episodes, advantages, args, supervised):
    total = sum(sum(e.sampled) for e in episodes)
    optimizer.zero_grad(set_to_none=True)
    stats = {"entropy": 0.0, "clip": 0.0}
    for part, adv in micro_batches(episodes, advantages, args.micro_tokens):
        ids, mask, sampled, gen, advantage = padded(part, adv)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        chosen = sampled[:, 1:]
        logits, targets, gen = logits[chosen], ids[:, 1:][chosen], gen[:, 1:][chosen]
        advantage = advantage.expand(-1, chosen.shape[1])[chosen]
        all_lp = logits.log_softmax(-1)
        lp = all_lp.gather(-1, targets[:, None])[:, 0]
        if supervised:
            loss = -lp.sum() / total
        else:
            old = lp.detach()
            ratio = (lp - old).exp()
            weight = (old - gen).exp().clamp(max=args.behaviour_cap)
            terms = -weight * advantage * ratio
            if args.proximal == "behaviour":
                ratio = (lp - gen).exp()
                terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if args.aggregation == "sequence_mean":
                terms = terms * (total / len(episodes)) / chosen.sum(1, keepdim=True).expand_as(chosen)[chosen]
            loss = terms.sum() / total
            entropy = -(all_lp.exp() * all_lp).sum(-1)
            stats["entropy"] += float(entropy.sum()) / total
            if args.entropy:
                loss = loss - args.entropy * entropy.sum() / total
        loss.backward()
    stats["grad"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm))
    optimizer.step()
    return stats


def group_advantages(episodes, size, kind):
    found = []
    for start in range(0, len(episodes), size):
        rewards = torch.tensor([e.reward for e in episodes[start : start + size]], dtype=torch.float64)
        centred = rewards - rewards.mean()
        if kind == "grpo":
            centred = centred / (rewards.std() + 1e-6) if rewards.std() > 1e-6 else centred * 0
        found += centred.float().tolist()
    return found


def advantages_of(episodes, args):
    found = group_advantages(episodes, args.group_size, args.advantage)
    return [value * args.negative if value < 0 else value for value in found]


def optimizer_of(model, lr, args):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(args.beta1, args.beta2), weight_decay=0.0)


def warm_start(model, player, args, log):
    data = demonstrations(player, args.demos)
    rng = random.Random(args.seed)  # noqa: S311 - the data order, not a secret
    optimizer = optimizer_of(model, args.sft_lr, args)
    for step in range(1, args.sft_steps + 1):
        update(model, optimizer, rng.sample(data, args.sft_batch), [1.0] * args.sft_batch, args, True)
        if step % args.sft_every == 0 and step >= args.sft_first:
            success, turns = rate(player, args.sft_eval, 1.0, args.sft_seed)
            log(f"sft {step} sampled {success:.3f} turns {turns:.1f}"
                + (f" greedy {rate(player, 100, 0.0)[0]:.3f}" if args.verbose else ""))  # fmt: skip
            if success >= args.sft_low:
                break
    return step, optimizer


def main():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--eta", type=int, default=0)
    add("--level", default="BabyAI-GoToObj-v0")
    add("--max_turns", type=int, default=20)
    add("--max_new", type=int, default=3)
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--kv_heads", type=int, default=2)
    add("--feed_forward", type=int, default=256)
    add("--init_std", type=float, default=0.0)
    add("--demos", type=int, default=300)
    add("--sft_lr", type=float, default=5e-4)
    add("--sft_batch", type=int, default=32)
    add("--sft_every", type=int, default=1)
    add("--sft_first", type=int, default=10)
    add("--sft_eval", type=int, default=200)
    add("--sft_seed", type=int, default=400_000)
    add("--sft_low", type=float, default=0.5)
    add("--sft_steps", type=int, default=200)
    add("--lr", type=float, default=6e-4)
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.95)
    add("--entropy", type=float, default=0.0)
    add("--keep", type=int, default=0, help="1: keep the warm start's optimizer state")
    add("--warmup", type=int, default=5, help="train steps of linear learning rate warm-up")
    add("--negative", type=float, default=0.1, help="scale of negative advantages")
    add("--proximal", default="present")
    add("--aggregation", default="sequence_mean")
    add("--warm", default="", help="safetensors file of the warm start: read if it exists, else written")
    add("--advantage", default="grpo")
    add("--behaviour_cap", type=float, default=2.0)
    add("--max_grad_norm", type=float, default=1.0)
    add("--micro_tokens", type=int, default=2048)
    add("--groups", type=int, default=16)
    add("--group_size", type=int, default=8)
    add("--steps", type=int, default=30)
    add("--eval_every", type=int, default=5)
    add("--target", type=float, default=0.90)
    add("--stop", type=int, default=1)
    add("--sft_only", action="store_true")
    add("--verbose", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    def log(text):
        print(f"[{time.process_time():7.1f}] {text}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, list(words()), TinyModel(
            seed=args.seed, hidden=args.hidden, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads,
            feed_forward=args.feed_forward, init_std=args.init_std or None))  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    log(f"parameters {sum(p.numel() for p in model.parameters())} vocabulary {len(tokenizer)}")
    player = Player(model, tokenizer, args.level, args.max_turns, args.max_new)
    if args.warm and os.path.exists(args.warm):
        load_model(model, args.warm)
        sft_steps, optimizer = 0, optimizer_of(model, args.sft_lr, args)
        optimizer.load_state_dict(torch.load(args.warm + ".optimizer", weights_only=True))
    else:
        sft_steps, optimizer = warm_start(model, player, args, log)
        if args.warm:
            save_model(model, args.warm)
            torch.save(optimizer.state_dict(), args.warm + ".optimizer")
    first, greedy = rate(player, 200, 1.0)[0], rate(player, 200, 0.0)[0]
    log(f"warm start after {sft_steps}: sampled {first:.3f} greedy {greedy:.3f}")
    result = {"seed": args.seed, "eta": args.eta, "sft_steps": sft_steps, "sampled0": first, "greedy0": greedy}
    if not args.sft_only:
        result |= train(model, player, optimizer if args.keep else None, args, log)
    print(json.dumps(result))


def train(model, player, optimizer, args, log):
    optimizer = optimizer or optimizer_of(model, args.lr, args)
    waiting: deque[list[Episode]] = deque()
    seed, costs, curve, reached = TRAIN_SEED + 100_000 * args.seed, [], {}, None
    for step in range(1, args.steps + 1):
        began = time.process_time()
        while len(waiting) <= args.eta:
            seeds = [seed + g for g in range(args.groups) for _ in range(args.group_size)]
            seed += args.groups
            waiting.append(player.play(seeds, 1.0))
        sampled_at = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / max(args.warmup, 1))
        batch = waiting.popleft()
        stats = update(model, optimizer, batch, advantages_of(batch, args), args, False)
        done = time.process_time()
        costs.append(done - began)
        count = len(batch)
        log(
            f"step {step} success {sum(e.success for e in batch) / count:.3f} "
            f"turns {sum(e.turns for e in batch) / count:.1f} tokens {sum(len(e.ids) for e in batch) / count:.0f} "
            f"sample {sampled_at - began:.2f} train {done - sampled_at:.2f} "
            f"entropy {stats['entropy']:.3f} grad {stats['grad']:.2f}"
        )
        if step % args.eval_every == 0:
            curve[step] = rate(player, 200, 1.0)[0]
            log(f"eval {step}: {curve[step]:.3f}")
            if curve[step] >= args.target and reached is None:
                reached = step
                if args.stop:
                    break
    return {"reached": reached, "curve": curve, "cpu_s_step": sum(costs) / len(costs), "cpu_s": sum(costs),
            "greedy": rate(player, 200, 0.0)[0]}  # fmt: skip


if __name__ == "__main__":
    main()
