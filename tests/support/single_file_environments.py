"""Objects in the style of `verifiers` single-file environments, of old and new versions, without the package."""

from __future__ import annotations

ROWS = [{"question": f"{number}+1?", "answer": str(number + 1)} for number in range(5)]


class Parser:
    def parse_answer(self, completion):
        return completion[-1]["content"].strip()


class Rubric:
    def __init__(self, funcs, weights=None, parser=None, **class_objects):
        self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)
        self.parser, self.class_objects = parser, class_objects


class Group:
    def __init__(self, *rubrics):
        self.rubrics = list(rubrics)


class Object:
    """Whatever it is given."""

    def __init__(self, **members):
        self.__dict__.update(members)


async def correct(parser, completion, answer) -> float:
    return float(parser.parse_answer(completion) == answer)


def short(completion, bound, **kwargs) -> float:
    assert {"prompt", "state", "info", "task"} <= kwargs.keys()
    return float(len(completion[-1].content) <= bound)


def load_environment(bound=3, **members):
    """One turn, two rubrics, an evaluation dataset of its own."""
    rubric = Group(Rubric([correct], parser=Parser()), Rubric([short], [0.5], bound=bound))
    chosen = {"dataset": ROWS, "eval_dataset": [{"prompt": [{"role": "user", "content": "6*7?"}], "answer": "42"}]}
    return Object(**{"system_prompt": "Be exact.", "rubric": rubric} | chosen | members)


class OldGuess:
    """Several turns, as files of the first versions: the answer comes with the state."""

    dataset = ROWS
    max_turns = 3

    def __init__(self):
        self.rubric = Rubric([lambda state: 1.0 / state["tries"] if state["won"] else 0.0])
        self.rubric.funcs[0].__name__ = "quick"

    def setup_state(self, state):
        return state | {"tries": 0, "won": False}

    def is_completed(self, messages, state, **kwargs):
        return state["won"] or state["turn"] >= self.max_turns

    def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        state["won"] = messages[-1]["content"] == state["answer"]
        return [{"role": "user", "content": "right" if state["won"] else "no"}], state


class NewGuess:
    """Several turns, as files of later versions: states change in place, a final answer ends the task."""

    def __init__(self):
        self.rubric = Rubric([self.tries], parser=Parser())
        self.cleaned = []

    def get_dataset(self):
        return ROWS

    dataset = ROWS

    async def setup_state(self, state):
        state["hints"] = list(state["info"].get("hints", []))

    async def is_completed(self, state):
        return False

    async def env_response(self, messages, state):
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = "right"
            return []
        return state["hints"].pop() if state["hints"] else "no"

    def tries(self, state) -> float:
        return float(len(state["trajectory"]))

    async def cleanup(self, state):
        self.cleaned.append(state["reward"])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Answering:
    """Answers tool calls by itself, and reads them as files of either kind do."""

    dataset = ROWS
    max_turns = 4
    oai_tools = ({"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}},)
    rubric = Rubric([lambda completion: float(completion[1]["content"] == "3")])

    def is_completed(self, state):
        return not state["trajectory"][-1]["completion"][-1].get("tool_calls")

    def env_response(self, messages, state):
        (call,) = messages[-1].tool_calls
        assert call.name == call["function"]["name"] == "add"
        assert call.arguments == call["function"]["arguments"]
        return [{"role": "tool", "content": "3", "tool_call_id": call["id"]}]
