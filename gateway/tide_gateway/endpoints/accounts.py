"""Keys and owners over HTTP, for operators only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tide_gateway.auth import Owners, stored
from tide_gateway.endpoints.calls import caller_of, check, described, small_body_of
from tide_gateway.keys import MAX_LABEL_CHARS, MAX_TASKS, Key, KeyRefused, KeyStore
from tide_gateway.roles import Role
from tide_gateway.specs import NAME
from tide_sdk.errors import TideError
from tide_sdk.wire import PRINTABLE

_OWNER = f"^{NAME.pattern}$"


class KeyRequest(BaseModel):
    """`POST /keys`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    owner: str = Field(pattern=_OWNER)
    role: Role = "agent"
    label: str = Field(default="", max_length=MAX_LABEL_CHARS, pattern=PRINTABLE)
    expires_days: float | None = Field(default=None, gt=0, le=3650, allow_inf_nan=False)


class OwnerRequest(BaseModel):
    """`PUT /owners/{owner}`; `max_tasks` counts over all environments, 0 for any number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tasks: int = Field(ge=0, le=MAX_TASKS)


class KeyView(BaseModel):
    """A key without its secret; moments are seconds since 1970, None for never."""

    model_config = ConfigDict(frozen=True)

    key_id: str
    owner: str
    role: Role
    label: str
    created_s: float
    expires_s: float | None
    revoked_s: float | None


class NewKeyView(KeyView):
    """A key that was just made; `key` is shown this once."""

    key: str


class OwnerView(BaseModel):
    """An owner's limit of tasks at once, 0 for none."""

    model_config = ConfigDict(frozen=True)

    owner: str
    max_tasks: int


def make_accounts_router(owners: Owners) -> APIRouter:
    """The routes of keys and owners."""
    router = APIRouter(tags=["keys"])

    async def store_for(request: Request) -> KeyStore:
        (await caller_of(request, owners)).require("operator")
        if owners.store is None:
            raise TideError("unavailable", "this gateway has no database of keys")
        return owners.store

    @router.get("/keys")
    async def keys(request: Request) -> list[KeyView]:
        """All keys, the newest first; revoked and expired ones too."""
        store = await store_for(request)
        return [KeyView(**_shown(key)) for key in await stored(store.keys())]

    @router.post("/keys", status_code=201, openapi_extra=described(KeyRequest))
    async def create(request: Request, response: Response) -> NewKeyView:
        """Make a key; its text is in this answer and nowhere else."""
        store = await store_for(request)
        wanted = check(KeyRequest, await small_body_of(request))
        days = wanted.expires_days
        lifetime_s = None if days is None else days * 86400.0
        try:
            text, key = await stored(store.create(wanted.owner, wanted.role, label=wanted.label, lifetime_s=lifetime_s))
        except KeyRefused as error:
            raise _invalid(error) from error
        owners.forget()
        response.headers["cache-control"] = "no-store"
        return NewKeyView(key=text, **_shown(key))

    @router.delete("/keys/{key_id}")
    async def revoke(request: Request, key_id: Annotated[str, Path(max_length=64)]) -> KeyView:
        """Revoke a key, for ever and on every replica within seconds; safe to repeat."""
        store = await store_for(request)
        key = await stored(store.revoke(key_id))
        if key is None:
            raise TideError("not_found", "key_id: there is no such key; give the 8 characters after tide_")
        owners.forget()
        return KeyView(**_shown(key))

    @router.get("/owners")
    async def limits(request: Request) -> list[OwnerView]:
        """The owners that have a limit."""
        store = await store_for(request)
        return [OwnerView(owner=o.owner, max_tasks=o.max_tasks) for o in await stored(store.owners())]

    @router.put("/owners/{owner}", openapi_extra=described(OwnerRequest))
    async def set_owner(request: Request, owner: Annotated[str, Path(pattern=_OWNER)]) -> OwnerView:
        """Set how many tasks an owner may have at once; safe to repeat."""
        store = await store_for(request)
        wanted = check(OwnerRequest, await small_body_of(request))
        try:
            limit = await stored(store.set_owner(owner, wanted.max_tasks))
        except KeyRefused as error:
            raise _invalid(error) from error
        return OwnerView(owner=limit.owner, max_tasks=limit.max_tasks)

    return router


def _shown(key: Key) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "owner": key.owner,
        "role": key.role,
        "label": key.label,
        "created_s": key.created_s,
        "expires_s": key.expires_s or None,
        "revoked_s": key.revoked_s or None,
    }


def _invalid(error: KeyRefused) -> TideError:
    words = str(error)
    return TideError("invalid", words, field=words.partition(":")[0] if ":" in words else "body")
