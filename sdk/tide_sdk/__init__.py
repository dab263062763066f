"""Wire contract, clients, environment server and the `@agent` decorator of TideRL.

Every public name is loaded when it is first used, so that `import tide_sdk` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_sdk.agents import Agent, AgentResult, agent, chat_agent, load_agent
    from tide_sdk.blocking import BlockingContext
    from tide_sdk.client import GatewayClient
    from tide_sdk.context import AgentContext
    from tide_sdk.environment import EndInfo, Environment, Start, StartInfo, Step
    from tide_sdk.errors import TideError
    from tide_sdk.footprints import Footprint, FootprintReporter
    from tide_sdk.http_connection import TransportError
    from tide_sdk.image_window import ImageWindow
    from tide_sdk.images import ImageUnknown, image
    from tide_sdk.many import run
    from tide_sdk.model import ModelEndpoint
    from tide_sdk.model_errors import ContextOverflow, ModelRefused, RequestInvalid
    from tide_sdk.outcomes import TaskResult, TaskSpec
    from tide_sdk.runner import run_task, run_tasks
    from tide_sdk.server import EnvironmentServer
    from tide_sdk.tool_calls import ToolError, ToolResult
    from tide_sdk.tools import ToolEnvironment, tool
    from tide_sdk.wire import Message

_MODULES = {
    # not `agent`: importing a module of that name would hide the decorator
    "agents": ("Agent", "AgentResult", "agent", "chat_agent", "load_agent"),
    "blocking": ("BlockingContext",),
    "client": ("GatewayClient",),
    "context": ("AgentContext",),
    "environment": ("EndInfo", "Environment", "Start", "StartInfo", "Step"),
    "errors": ("TideError",),
    "footprints": ("Footprint", "FootprintReporter"),
    "http_connection": ("TransportError",),
    "image_window": ("ImageWindow",),
    "images": ("ImageUnknown", "image"),
    "many": ("run",),
    "model": ("ModelEndpoint",),
    "model_errors": ("ContextOverflow", "ModelRefused", "RequestInvalid"),
    "outcomes": ("TaskResult", "TaskSpec"),
    "runner": ("run_task", "run_tasks"),
    "server": ("EnvironmentServer",),
    "tool_calls": ("ToolError", "ToolResult"),
    "tools": ("ToolEnvironment", "tool"),
    "wire": ("Message",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Agent",
    "AgentContext",
    "AgentResult",
    "BlockingContext",
    "ContextOverflow",
    "EndInfo",
    "Environment",
    "EnvironmentServer",
    "Footprint",
    "FootprintReporter",
    "GatewayClient",
    "ImageUnknown",
    "ImageWindow",
    "Message",
    "ModelEndpoint",
    "ModelRefused",
    "RequestInvalid",
    "Start",
    "StartInfo",
    "Step",
    "TaskResult",
    "TaskSpec",
    "TideError",
    "ToolEnvironment",
    "ToolError",
    "ToolResult",
    "TransportError",
    "agent",
    "chat_agent",
    "image",
    "load_agent",
    "run",
    "run_task",
    "run_tasks",
    "tool",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tide_sdk' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tide_sdk.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
