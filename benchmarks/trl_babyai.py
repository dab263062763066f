"""BabyAI-GoToObj by TRL's GRPOTrainer with `environment_factory`; runs in `.venv-trl`, started by bench_train.py.

The same text, tokens, model, reward, seeds and optimizer as the quickstart's:

- The chat template writes a tool call of `act` as `<assistant> WORD <end>` and a tool's answer as `<user> TEXT`, and
  the response template reads whatever the model says as the word: an episode has the same token ids as with
  `tide-train`.
- An episode ends without a further turn, as with `tide-train`: GRPOTrainer 1.16 asks for another reply after each tool
  answer, except where the answer would not fit; so the last answer is made not to fit, and TRL leaves it out.
- A turn may sample as many tokens as with `tide-train`, not `max_completion_length` of them, which TRL would wait for.

`--plain` leaves the last two out, as GRPOTrainer does unasked: every episode then has all its turns, and costs twice.

Writes one JSON line a train step to OUT/rank0.jsonl (rank1.jsonl with two processes) and the weights of each train step
to OUT/snapshots/N.safetensors; the time that this takes is in no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tide_environments.babyai.game import Game

END = "<end>"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<user>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<assistant>{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{% if c['function']['name'] == 'act' %}{{ c['function']['arguments']['word'] }}"
    "{% else %}{{ c['function']['name'] }}"
    "{% for k, v in c['function']['arguments'].items() %} {{ k }} {{ v }}{% endfor %}{% endif %}"
    "{% endfor %}<end>"
    "{% else %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "act", "arguments": {"word": "{content}"}}},
        }
    },
}
LOSSES = {"token_mean": "dapo", "sequence_mean": "grpo"}
SCALES = {"grpo": "group", "dr_grpo": "none", "rloo": "none"}


class BabyAI:
    """What `environment_factory` makes: an episode of the configured level, played in this process."""

    parameters: ClassVar[dict[str, Any]] = {}
    too_long: ClassVar[str] = ""
    wall_s: ClassVar[float] = 0.0
    num_turns: ClassVar[int] = 0
    num_successes: ClassVar[int] = 0

    def reset(self, seed: int, **_: Any) -> str:
        """Begins the episode of a seed; returns its first observation."""
        began = time.perf_counter()
        self._game = Game(self.parameters["level"], seed, max_turns=self.parameters["max_turns"])
        self._reward, self._last = 0.0, ""
        BabyAI.wall_s += time.perf_counter() - began
        return self._game.text

    def act(self, word: str) -> str:
        """Plays one action word.

        Args:
            word: the action.

        Returns:
            What the agent sees now.
        """
        if self._last:
            return self._last
        began = time.perf_counter()
        played = self._game.act(word.split(END)[0])
        BabyAI.wall_s += time.perf_counter() - began
        BabyAI.num_turns += 1
        if not (played.terminated or played.truncated):
            return played.text
        self._reward = played.reward
        BabyAI.num_successes += played.success
        self._last = self.too_long or played.text
        return self._last

    def get_reward(self) -> float:
        """The episode's reward; 0 until it succeeds."""
        return self._reward


class Trainer(GRPOTrainer):
    """GRPOTrainer that notes how long the rollout took and what it was made of."""

    rollout_wall_s = 0.0
    num_episodes = 0
    num_tokens = 0
    num_sampled_tokens = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        self.rollout_wall_s += time.perf_counter() - began
        self.num_episodes += len(found["prompt_mask"])
        self.num_tokens += int(found["prompt_mask"].sum() + found["completion_mask"].sum())
        self.num_sampled_tokens += int((found["completion_mask"] * found["tool_mask"]).sum())
        return found


class Recorder(TrainerCallback):
    """Writes a line and the weights after each train step."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.trainer: Trainer | None = None
        self._own_s = 0.0
        self._own_cpu_s = 0.0
        (out / "snapshots").mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Starts both clocks."""
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Writes the step's line; sums since the start of training."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        trainer = self.trainer
        assert trainer is not None
        record = {
            "train_step": state.global_step,
            "wall_s": wall_s - self._wall_s - self._own_s,
            "cpu_s": cpu_s - self._cpu_s - self._own_cpu_s,
            "rollout_wall_s": trainer.rollout_wall_s,
            "environment_wall_s": BabyAI.wall_s,
            "num_episodes": trainer.num_episodes,
            "num_tokens": trainer.num_tokens,
            "num_sampled_tokens": trainer.num_sampled_tokens,
            "num_turns": BabyAI.num_turns,
            "num_successes": BabyAI.num_successes,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        with open(self._out / f"rank{args.process_index}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if args.process_index == 0:
            weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
            save_file(weights, self._out / "snapshots" / f"{state.global_step}.safetensors", {"format": "pt"})
        self._own_s += time.perf_counter() - wall_s
        self._own_cpu_s += time.process_time() - cpu_s


def configuration(settings: dict[str, Any], out: Path, max_steps: int, world: int, *, plain: bool) -> GRPOConfig:
    """The quickstart's settings as TRL names them; `plain` sets no limit on a turn's tokens.

    Raises:
        ValueError: TRL has no such advantage or loss.
    """
    algorithm, train, rollout = settings["algorithm"], settings["train"], settings["rollout"]
    loss, method = algorithm["loss"], algorithm["advantage"]["method"]
    if loss["policy"] != "ppo" or loss["aggregation"] not in LOSSES or method not in SCALES:
        raise ValueError(f"no TRL setting equals algorithm.loss = {loss} with advantages by {method!r}; add it here")
    episodes = algorithm["groups_per_batch"] * algorithm["group_size"]
    return GRPOConfig(
        output_dir=str(out / "output"),
        max_steps=max_steps,
        per_device_train_batch_size=episodes // world,
        gradient_accumulation_steps=1,
        num_generations=algorithm["group_size"],
        max_completion_length=rollout["max_context_tokens"],
        generation_kwargs=None if plain else {"max_new_tokens": rollout["max_new_tokens"]},
        max_tool_calling_iterations=settings["tasks"]["parameters"]["max_turns"],
        temperature=rollout["temperature"],
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=loss["clip_low"],
        epsilon_high=loss["clip_high"],
        entropy_coef=loss["entropy_coefficient"],
        loss_type=LOSSES[loss["aggregation"]],
        scale_rewards=SCALES[method],
        learning_rate=train["learning_rate"],
        max_grad_norm=train["max_grad_norm"],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=settings["run"]["seed"],
    )


def optimizer_of(model: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """AdamW with the quickstart's schedule: a linear warm-up that begins above 0, then a linear fall."""
    train = settings["train"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train["learning_rate"],
        betas=tuple(train["betas"]),
        weight_decay=train["weight_decay"],
    )
    warmup, last, kept = train["warmup_train_steps"], settings["run"]["max_train_steps"], train["final_fraction"]

    def share(done: int) -> float:
        rise = min(1.0, (done + 1) / warmup) if warmup else 1.0
        falling = max(0, done + 1 - warmup) / max(1, last - warmup)
        return rise * (1.0 - (1.0 - kept) * min(1.0, falling))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def main() -> None:
    """Trains from a model folder and the JSON of a resolved quickstart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=Path, required=True, help="JSON of the resolved configuration")
    parser.add_argument("--model", required=True, help="warm-started model folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--plain", action="store_true", help="neither end episodes early nor bound a turn's tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = json.loads(arguments.settings.read_text(encoding="utf-8"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    BabyAI.parameters = settings["tasks"]["parameters"]
    if not arguments.plain:
        BabyAI.too_long = "success " * (settings["rollout"]["max_context_tokens"] + 1)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    num_prompts = settings["algorithm"]["groups_per_batch"] * arguments.max_steps
    first = settings["tasks"]["train_seed"]
    rows = [{"prompt": [{"role": "user", "content": ""}], "seed": first + index} for index in range(num_prompts)]
    recorder = Recorder(arguments.out)
    recorder.trainer = Trainer(
        model=model,
        args=configuration(settings, arguments.out, arguments.max_steps, world, plain=arguments.plain),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=BabyAI,
        callbacks=[recorder],
        optimizers=optimizer_of(model, settings),
    )
    recorder.trainer.train()


if __name__ == "__main__":
    main()
