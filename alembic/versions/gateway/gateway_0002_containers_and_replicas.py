"""Several replicas on one database, servers that outlive a gateway, keys, queues and heartbeats.

Environment servers of a gateway before this revision died with it: their rows go, and with them the old heartbeats,
of which the newest becomes the deployment's. A deployment's name is made by the first gateway that opens.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "gateway_0002"
down_revision = "gateway_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("label", sa.String(length=128), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("expires_s", sa.Float(), nullable=False),
        sa.Column("revoked_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_table(
        "deployment",
        sa.Column("one", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("seen_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_deployment")),
    )
    op.create_table(
        "heartbeats",
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("prefix", sa.String(length=512), nullable=False),
        sa.Column("timeout_s", sa.Float(), nullable=False),
        sa.Column("seen_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "prefix", name=op.f("pk_heartbeats")),
    )
    op.create_table(
        "owners",
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("max_tasks", sa.Integer(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_owners")),
    )
    op.create_table(
        "start_rates",
        sa.Column("environment", sa.String(length=128), nullable=False),
        sa.Column("next_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("environment", name=op.f("pk_start_rates")),
    )
    op.create_table(
        "start_tickets",
        sa.Column("environment", sa.String(length=128), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=512), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("asked_s", sa.Float(), nullable=False),
        sa.Column("expires_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("environment", "owner", "key", name=op.f("pk_start_tickets")),
    )
    # Not HAVING without GROUP BY, which SQLite before 3.39 does not know.
    op.execute(
        "INSERT INTO deployment (one, name, seen_s)"
        " SELECT 1, '', newest FROM (SELECT MAX(seen_s) AS newest FROM replicas) AS heartbeats_of_all"
        " WHERE newest IS NOT NULL"
    )
    op.execute("DELETE FROM replicas")
    op.execute("DELETE FROM instances")
    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("version", sa.BigInteger(), nullable=False))
        batch_op.add_column(sa.Column("slot", sa.Integer(), nullable=False))
        batch_op.add_column(sa.Column("capacity", sa.Integer(), nullable=False))
        batch_op.add_column(sa.Column("served", sa.Integer(), nullable=False))
        batch_op.add_column(sa.Column("place", sa.Text(), nullable=False))
        batch_op.drop_column("pid")

    with op.batch_alter_table("replicas", schema=None) as batch_op:
        batch_op.add_column(sa.Column("host", sa.String(length=256), nullable=False))
        batch_op.add_column(sa.Column("pid", sa.Integer(), nullable=False))
        batch_op.add_column(sa.Column("ticks", sa.BigInteger(), nullable=False))

    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.add_column(sa.Column("max_pause_s", sa.Float(), nullable=False, server_default="1e17"))
        batch_op.add_column(sa.Column("max_wall_s", sa.Float(), nullable=False, server_default="1e17"))
        batch_op.add_column(sa.Column("wall_since_s", sa.Float(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("worker", sa.String(length=64), nullable=False, server_default=""))
        batch_op.create_index(
            "ix_tasks_holding",
            ["environment", "owner"],
            unique=False,
            sqlite_where=sa.text("released = 0"),
            postgresql_where=sa.text("released = 0"),
        )
        batch_op.create_index(
            "ix_tasks_instance",
            ["instance"],
            unique=False,
            sqlite_where=sa.text("released = 0"),
            postgresql_where=sa.text("released = 0"),
        )

    op.execute("UPDATE tasks SET wall_since_s = created_s")
    # What was in flight is taken over as from a replica that is dead; without a worker nobody would.
    op.execute(
        "UPDATE tasks SET worker = 'gateway_0001' WHERE released = 0"
        " AND state IN ('starting', 'acting', 'pausing', 'ending', 'done')"
    )


def downgrade() -> None:
    op.execute("DELETE FROM instances")
    op.execute("DELETE FROM replicas")
    op.execute(
        "INSERT INTO replicas (name, started_s, seen_s, host, pid, ticks)"
        " SELECT 'downgraded', seen_s, seen_s, '', 0, 0 FROM deployment"
    )
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_tasks_instance", sqlite_where=sa.text("released = 0"), postgresql_where=sa.text("released = 0")
        )
        batch_op.drop_index(
            "ix_tasks_holding", sqlite_where=sa.text("released = 0"), postgresql_where=sa.text("released = 0")
        )
        batch_op.drop_column("worker")
        batch_op.drop_column("wall_since_s")
        batch_op.drop_column("max_wall_s")
        batch_op.drop_column("max_pause_s")

    with op.batch_alter_table("replicas", schema=None) as batch_op:
        batch_op.drop_column("ticks")
        batch_op.drop_column("pid")
        batch_op.drop_column("host")

    with op.batch_alter_table("instances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("pid", sa.INTEGER(), nullable=False))
        batch_op.drop_column("place")
        batch_op.drop_column("served")
        batch_op.drop_column("capacity")
        batch_op.drop_column("slot")
        batch_op.drop_column("version")

    op.drop_table("start_tickets")
    op.drop_table("start_rates")
    op.drop_table("owners")
    op.drop_table("heartbeats")
    op.drop_table("deployment")
    op.drop_table("api_keys")
