"""What a check is: a sentence of the contract, a function that tries it, and the ways in which that ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tide_sdk.check.talk import Talk

Run = Callable[["Talk"], Awaitable[None]]
USUAL_ACTION: Mapping[str, Any] = {"role": "assistant", "content": "hello"}
"""Where the author names none."""


class Failed(Exception):
    """The server did not do what the contract says; the message says what it did."""


class Skipped(Exception):
    """The check cannot be made here; the message says why and how it can."""


@dataclass(frozen=True, slots=True)
class Case:
    """One check.

    Attributes:
        name: its id, `subject.what`.
        section: the heading of `docs/contract.md` that it belongs to.
        says: what the contract says, in a sentence.
        run: tries it out; raises `Failed` or `Skipped`.
        kills: True if it ends the server.
    """

    name: str
    section: str
    says: str
    run: Run
    kills: bool = False


def case(name: str, section: str, says: str, *, kills: bool = False) -> Callable[[Run], Case]:
    """Make a `Case` of a function."""
    return lambda run: Case(name, section, says, run, kills)


@dataclass(frozen=True, slots=True)
class Result:
    """How a check ended.

    Attributes:
        case: the check.
        result: pass, fail or skip.
        detail: what went wrong or why it was skipped, in one line; what was found, where there is something to say.
        exchanges: the last requests and answers of a check that failed.
        took_s: seconds.
    """

    case: Case
    result: Literal["pass", "fail", "skip"]
    detail: str
    exchanges: tuple[str, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What the author says about the environment, so that any can be driven.

    Attributes:
        environment: the name that starts carry; None takes the server's own, as a gateway does.
        task: parameters of each start.
        split: data split of each start.
        actions: assistant messages that do not end the task; the first is the usual one.
        end_actions: assistant messages that, sent in this order, end a task.
        slow_action: an assistant message that takes the environment a second or more.
        max_tasks: tasks that are held at once at most.
        timeout_s: seconds that a check, and each of its calls, may take.
    """

    environment: str | None = None
    task: dict[str, Any] | None = None
    split: str | None = None
    actions: tuple[Mapping[str, Any], ...] = (USUAL_ACTION,)
    end_actions: tuple[Mapping[str, Any], ...] = ()
    slow_action: Mapping[str, Any] | None = None
    max_tasks: int = 64
    timeout_s: float = 60.0

    def action(self, text: str | None = None) -> dict[str, Any]:
        """The usual action; with other words in it where `text` is given."""
        action = dict(self.actions[0])
        return action if text is None else action | {"content": text}
