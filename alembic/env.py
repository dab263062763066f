"""Runs the migrations of one side, gateway or trainer; the section's name says which.

Only the named side's models are imported. Tables of the other side in the same database are left alone.
"""

from __future__ import annotations

import importlib

from alembic import context
from sqlalchemy import MetaData
from sqlalchemy.engine import Connection, make_url

from tide_sdk.migrations import only_migration

MODELS = {"gateway": "tide_gateway.models", "trainer": "tide_trainer.persistence.models"}

config = context.config
side = config.config_ini_section
if side not in MODELS:
    raise SystemExit(f"alembic: say which side, -n gateway or -n trainer (got {side!r})")
metadata: MetaData = importlib.import_module(MODELS[side]).Base.metadata
version_table = config.get_main_option("version_table") or f"{side}_alembic_version"
url = context.get_x_argument(as_dictionary=True).get("url") or config.get_main_option("sqlalchemy.url") or ""


def include_name(name: str | None, kind: str, _parents: object) -> bool:
    """Only this side's own tables are compared."""
    return kind != "table" or name in metadata.tables


def configure(**target: object) -> None:
    """The options that both ways share; SQLite alters tables by copying them."""
    context.configure(
        target_metadata=metadata,
        version_table=version_table,
        include_name=include_name,
        render_as_batch=True,
        compare_type=True,
        **target,
    )


def run(connection: Connection) -> None:
    """Migrate over an open connection, in the transaction that it is in."""
    configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif (given := config.attributes.get("connection")) is not None:
    run(given)
else:
    with only_migration(make_url(url)) as opened:
        run(opened)
