"""How an action is read from what a model writes, by the kind of the action space."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

_MAX_SHOWN = 20


class BadAction(Exception):
    """The message holds no action, or one that the space does not allow; told to the model."""


def read_action(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """The action that a message asks for.

    A text space takes the whole message. A discrete one takes a name or a number that is the message, that ends it, or
    that is the only one in it. Every other takes JSON: the message, or what stands in its last pair of brackets.

    Args:
        space: a gymnasium space.
        text: the message's words.
        names: of a discrete space's actions, in their order.

    Raises:
        BadAction: says what is expected.
    """
    kind = type(space).__name__
    if kind == "Text":
        action: Any = text
    elif kind == "Discrete":
        first = int(space.start)
        action = first + _index(text, names or [str(first + index) for index in range(int(space.n))])
    else:
        action = as_action(space, _json(text, space))
    if not space.contains(action):
        raise BadAction(f"that action is not allowed; give {expected(space)}")
    return action


def as_action(space: Any, value: Any) -> Any:
    """JSON data as an element of a space, not yet checked against its bounds.

    Raises:
        BadAction: it has another shape.
    """
    import numpy

    kind = type(space).__name__
    try:
        if kind == "Dict":
            members = cast("dict[str, Any]", value)
            return {key: as_action(inner, members[key]) for key, inner in space.spaces.items()}
        if kind == "Tuple":
            return tuple(as_action(inner, one) for inner, one in zip(space.spaces, value, strict=True))
        if kind == "Text":
            return value
        if kind == "Discrete":
            return _whole(value)
        if kind == "Box":
            array = numpy.asarray(value)
            if array.dtype.kind not in "biuf" or (space.dtype.kind in "iu" and array.dtype.kind == "f"):
                raise TypeError("other numbers are expected")
            return _converted(array, space.dtype)
        if kind in ("MultiDiscrete", "MultiBinary"):
            array = numpy.asarray(value)
            if array.dtype.kind not in "iub":
                raise TypeError("whole numbers are expected")
            return _converted(array, space.dtype)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
        raise BadAction(f"that is not the action's form; give {expected(space)}") from error
    raise NotImplementedError(f"an action space of kind {kind}: override read_action")


def expected(space: Any, names: Sequence[str] = ()) -> str:
    """What a message must hold, in words."""
    kind = type(space).__name__
    if names:
        return "one of: " + ", ".join(names)
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "MultiDiscrete":
        lows = space.start.flatten().tolist()
        highs = (space.start + space.nvec - 1).flatten().tolist()
        bounds = ", ".join(f"{low} to {high}" for low, high in zip(lows, highs, strict=True))
        return f"a JSON array of whole numbers of shape {list(space.nvec.shape)}: {_short(bounds)}"
    if kind == "MultiBinary":
        return f"a JSON array of 0 and 1 of shape {list(space.shape)}"
    if kind == "Box":
        same = bool((space.low == space.low.flat[0]).all() and (space.high == space.high.flat[0]).all())
        low, high = (space.low.flat[0], space.high.flat[0]) if same else (space.low.tolist(), space.high.tolist())
        return f"a JSON array of numbers of shape {list(space.shape)} from {_short(str(low))} to {_short(str(high))}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Dict":
        return "a JSON object: " + "; ".join(f"{key}: {expected(inner)}" for key, inner in space.spaces.items())
    if kind == "Tuple":
        return "a JSON array: " + "; ".join(expected(inner) for inner in space.spaces)
    return "an action"


def _converted(array: Any, dtype: Any) -> Any:
    converted = array.astype(dtype)
    if dtype.kind in "iub" and not (converted == array).all():
        raise ValueError("a number is out of bounds")  # it would have wrapped around
    return converted


def _index(text: str, names: Sequence[str]) -> int:
    places = {name.casefold(): index for index, name in enumerate(names)}
    said = text.strip().casefold()
    ending = re.split(r"[:\n]", said)[-1].strip(" .!*`\"'")
    for word in (said, said.strip(" .!*`\"'"), ending):
        if word in places:
            return places[word]
    found = {index for name, index in places.items() if re.search(rf"(?<![\w.-]){re.escape(name)}(?!\w|\.\d)", said)}
    if len(found) == 1:
        return found.pop()
    what = "more than one action" if found else "no action"
    listed = ", ".join(names) if len(names) <= _MAX_SHOWN else f"{names[0]} to {names[-1]}"
    raise BadAction(f"the message holds {what}; give one of: {listed}")


def _json(text: str, space: Any) -> Any:
    tries = [text.strip()]
    for opening, closing in (("{", "}"), ("[", "]")):
        last = text.rfind(closing)
        start = text.find(opening)
        if 0 <= start < last:
            tries.append(text[start : last + 1])
    for one in tries:
        try:
            return json.loads(one)
        except (ValueError, RecursionError):
            continue
    raise BadAction(f"the message holds no JSON; give {expected(space)}")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("a whole number is expected")
    return value


def _short(words: str) -> str:
    return words if len(words) <= 200 else words[:200] + "..."
