"""Who calls, and what the three roles may do.

agent      its owner's own tasks: the five calls, their views, capacity, heartbeats
author     as agent, and the environment servers with their logs
operator   as author, and everything of every owner: tasks, keys, limits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from tide_sdk.errors import TideError

Role = Literal["agent", "author", "operator"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""Weakest first; each may do what the ones before it may."""
LOCAL_OWNER = "local"


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner and role of a call."""

    owner: str
    role: Role

    def may(self, role: Role) -> bool:
        """True if the caller's role is `role` or a stronger one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def require(self, role: Role) -> Caller:
        """The caller itself, if its role is `role` or a stronger one.

        Raises:
            TideError: 403.
        """
        if not self.may(role):
            raise TideError("forbidden", f"this needs a key of role {role}; yours has role {self.role}", role=role)
        return self


LOCAL: Final = Caller(LOCAL_OWNER, "operator")
"""Whoever calls a gateway that has neither keys nor tokens; it then serves this machine only."""
