"""The environment server that `make bench-gateway` measures everything against: FastAPI as an author would write it.

It speaks the contract, counts the turns of its tasks, and has no clocks: `uvicorn fastapi_environment:app --port 8000`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

CAPACITY = 1024
INCARNATION = secrets.token_hex(8)


class Parameters(BaseModel):
    turns: int = Field(default=20, ge=1)
    observation_chars: int = Field(default=200, ge=0)


class StartBody(BaseModel):
    key: str
    task: Parameters = Parameters()


class Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None


class StartAnswer(BaseModel):
    task_id: str
    turn: int
    messages: list[Message]
    tools: list[dict[str, Any]]
    limits: dict[str, float]
    clocks: dict[str, Any]


class ActionBody(BaseModel):
    task_id: str
    turn: int = Field(ge=0)
    message: Message


class ActionAnswer(BaseModel):
    turn: int
    messages: list[Message]
    reward: float | None
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    clocks: dict[str, Any]


class EpochBody(BaseModel):
    task_id: str
    epoch: int = 0


class EpochAnswer(BaseModel):
    state: str
    epoch: int
    clocks: dict[str, Any]


class EndBody(BaseModel):
    task_id: str
    reason: str | None = None


class EndAnswer(BaseModel):
    reward: float | None
    metrics: dict[str, float]
    turns: int
    clocks: dict[str, Any]
    outcome: dict[str, str]


class Health(BaseModel):
    contract: int
    environment: str
    capacity: int
    tasks: int
    incarnation: str


@dataclass(slots=True)
class Task:
    parameters: Parameters
    turn: int = 0
    answer: ActionAnswer | None = None
    state: str = "waiting"


app = FastAPI()
tasks: dict[str, Task] = {}


def held(task_id: str) -> Task:
    if task_id not in tasks:
        raise HTTPException(404, f"task_id: no task {task_id}")
    return tasks[task_id]


@app.get("/health")
async def health() -> Health:
    return Health(contract=1, environment="counting", capacity=CAPACITY, tasks=len(tasks), incarnation=INCARNATION)


@app.post("/start", status_code=201)
async def start(body: StartBody) -> StartAnswer:
    task_id = secrets.token_hex(8)
    tasks[task_id] = Task(body.task)
    first = Message(role="user", content="o" * body.task.observation_chars)
    return StartAnswer(task_id=task_id, turn=0, messages=[first], tools=[], limits={}, clocks={})


@app.post("/observation")
async def observation(body: ActionBody) -> ActionAnswer:
    task = held(body.task_id)
    if body.turn == task.turn - 1 and task.answer is not None:
        return task.answer
    if body.turn != task.turn:
        raise HTTPException(409, f"turn: {body.turn} is not the next one, {task.turn}")
    task.turn += 1
    done = task.turn >= task.parameters.turns
    task.answer = ActionAnswer(
        turn=task.turn,
        messages=[Message(role="user", content="o" * task.parameters.observation_chars)],
        reward=1.0 if done else 0.0,
        terminated=done,
        truncated=False,
        info={"effects": task.turn},
        clocks={},
    )
    return task.answer


@app.post("/pause")
async def pause(body: EpochBody) -> EpochAnswer:
    return change(body, "paused")


@app.post("/resume")
async def resume(body: EpochBody) -> EpochAnswer:
    return change(body, "waiting")


def change(body: EpochBody, state: str) -> EpochAnswer:
    held(body.task_id).state = state
    return EpochAnswer(state=state, epoch=body.epoch, clocks={})


@app.post("/end")
async def end(body: EndBody) -> EndAnswer:
    task = held(body.task_id)
    del tasks[body.task_id]
    done = task.turn >= task.parameters.turns
    outcome = {"kind": "completed"} if done else {"kind": "aborted", "reason": body.reason or "asked for"}
    return EndAnswer(reward=1.0 if done else 0.0, metrics={}, turns=task.turn, clocks={}, outcome=outcome)
