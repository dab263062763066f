"""Gymnasium environments, played by messages.

    FrozenLake = wrap("FrozenLake-v1", actions=["left", "down", "right", "up"], is_slippery=False)

Serve it with `tide-env serve module:FrozenLake`. Each task has an environment of its own, made and used in one thread.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

from tide_sdk import codec
from tide_sdk.environment import Environment, Start, StartInfo, Step
from tide_sdk.errors import TideError
from tide_sdk.wire import Message
from tide_sdk.wrappers.gymnasium_actions import BadAction, expected, read_action
from tide_sdk.wrappers.plain import plain

E = TypeVar("E", bound="GymnasiumEnvironment")


def _not_given() -> Any:
    raise NotImplementedError("make: give what makes the gymnasium environment, or use wrap")


class GymnasiumEnvironment(Environment):
    """One gymnasium environment; `wrap` makes subclasses, which may override `read_action`, `describe` and `intro`.

    The task's seed and its parameter `options` go to `reset`. Reward, terminated and truncated are passed on, `info` as
    plain data. A message without a possible action is answered and changes nothing; `max_bad_actions` of them one after
    the other truncate the task.

    Attributes:
        make: makes the environment.
        actions: names of a discrete space's actions, in their order.
        rules: what the model is told first, before the observation.
        image: show what the environment renders, as an image beside the words.
        max_turns: messages after which the task is truncated; None leaves that to the environment.
        max_bad_actions: messages without an action, one after the other, that truncate the task.
    """

    make: ClassVar[Callable[..., Any]] = staticmethod(_not_given)
    actions: ClassVar[Sequence[str]] = ()
    rules: ClassVar[str] = ""
    image: ClassVar[bool] = False
    max_turns: ClassVar[int | None] = None
    max_bad_actions: ClassVar[int] = 5

    gym: Any = None
    """The gymnasium environment; None before the start."""
    _num_turns: int = 0
    _num_bad: int = 0

    def start(self, task: StartInfo) -> Start:
        """Make and reset the environment.

        Raises:
            TideError: `invalid`, naming the task parameter.
        """
        options = task.task.get("options")
        unknown = sorted(task.task.keys() - {"options"})
        if unknown:
            raise TideError("invalid", f"task.{unknown[0]}: only `options` is known", field=f"task.{unknown[0]}")
        if options is not None and not isinstance(options, dict):
            raise TideError("invalid", "task.options: an object is expected", field="task.options")
        self.gym = type(self).make()
        if self.actions and int(self.gym.action_space.n) != len(self.actions):
            raise ValueError(f"actions: {len(self.actions)} names for {self.gym.action_space.n} actions")
        # None lets gymnasium choose; its seeds have 32 bits in some environments.
        seed = None if task.seed is None else task.seed % 2**32
        observation, _ = self.gym.reset(seed=seed, options=options)
        return Start([self._message(self.intro(), self.describe(observation))])

    def step(self, message: Message) -> Step:
        """Act once, or say why not."""
        self._num_turns += 1
        last = self.max_turns is not None and self._num_turns >= self.max_turns
        try:
            action = self.read_action(message.text)
        except BadAction as error:
            self._num_bad += 1
            over = last or self._num_bad >= self.max_bad_actions
            return Step(str(error), truncated=over, info={"bad_action": True})
        self._num_bad = 0
        observation, reward, terminated, truncated, info = self.gym.step(action)
        cut = bool(truncated) or (last and not terminated)
        return Step([self._message(self.describe(observation))], float(reward), bool(terminated), cut, plain(info))

    def end(self, reason: str | None) -> None:
        """Close the environment."""
        if self.gym is not None:
            self.gym.close()

    def intro(self) -> str:
        """What the model reads before the first observation: `rules`, and what an action looks like."""
        form = f"Answer with {expected(self.gym.action_space, self.actions)}."
        return f"{self.rules}\n{form}" if self.rules else form

    def read_action(self, text: str) -> Any:
        """The action that a message asks for.

        Raises:
            BadAction: there is none; the model is told the error's words.
        """
        return read_action(self.gym.action_space, text, self.actions)

    def describe(self, observation: Any) -> str:
        """The observation in words; by default a text as it is, and anything else as JSON."""
        if isinstance(observation, str):
            return observation
        shown = plain(observation)
        if isinstance(shown, str):
            return "" if self.image else shown
        return codec.dumps(shown).decode()

    def _message(self, *words: str) -> dict[str, Any]:
        text = "\n\n".join(word for word in words if word)
        if not self.image:
            return {"role": "user", "content": text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        return {"role": "user", "content": [*parts, image_part(self.gym.render())]}


def wrap(
    environment: str | Callable[..., Any],
    *,
    name: str = "",
    actions: Sequence[str] = (),
    rules: str = "",
    image: bool = False,
    max_turns: int | None = None,
    blocking: bool = True,
    base: type[E] = GymnasiumEnvironment,
    **options: Any,
) -> type[E]:
    """A class that serves a gymnasium environment.

    Args:
        environment: an id that `gymnasium.make` knows, or what makes an environment.
        name: of the environment; taken from the id if empty.
        actions: names of a discrete space's actions, in their order.
        rules: what the model is told first.
        image: show what it renders (`render_mode="rgb_array"`); needs Pillow.
        max_turns: messages after which a task is truncated.
        blocking: False runs it on the event loop, for environments that take less than a millisecond.
        base: a subclass of `GymnasiumEnvironment` with `read_action`, `describe` or `intro` of your own.
        options: for `gymnasium.make`, or for the maker.
    """
    if image:
        options = {"render_mode": "rgb_array", **options}
    shown = environment if isinstance(environment, str) else getattr(environment, "__name__", "gymnasium")

    def make() -> Any:
        if not isinstance(environment, str):
            return environment(**options)
        import gymnasium

        return gymnasium.make(environment, **options)

    attributes: Mapping[str, Any] = {
        "name": name or re.sub(r"\W+", "-", shown).strip("-").lower(),
        "make": staticmethod(make),
        "actions": tuple(actions) or base.actions,
        "rules": rules or base.rules,
        "image": image or base.image,
        "max_turns": max_turns or base.max_turns,
        "blocking": blocking,
        "__doc__": f"The gymnasium environment {shown}.",
    }
    return cast("type[E]", type(re.sub(r"\W", "", shown) or "Wrapped", (base,), dict(attributes)))


def image_part(frame: Any) -> dict[str, Any]:
    """A rendered frame as an OpenAI image part, a PNG.

    Args:
        frame: `[height, width, 3]` numbers from 0 to 255.

    Raises:
        ValueError: the environment rendered something else.
    """
    from PIL import Image

    if getattr(frame, "ndim", 0) != 3 or frame.shape[2] not in (3, 4) or not frame.size:
        raise ValueError("render() gave no RGB frame; make the environment with render_mode='rgb_array'")
    if str(frame.dtype) != "uint8":
        least, most = float(frame.min()), float(frame.max())
        fraction = frame.dtype.kind == "f" and 0 < most <= 1
        if fraction or not (least >= 0 and most <= 255):
            raise ValueError(f"render() gave numbers from {least:g} to {most:g}; give 0 to 255, best as uint8")
    out = io.BytesIO()
    Image.fromarray(frame.astype("uint8")).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
