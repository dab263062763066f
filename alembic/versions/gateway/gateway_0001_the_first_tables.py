"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "gateway_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "instances",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("environment", sa.String(length=128), nullable=False),
        sa.Column("runtime", sa.String(length=32), nullable=False),
        sa.Column("replica", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("incarnation", sa.String(length=128), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_instances")),
    )
    op.create_table(
        "replicas",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("started_s", sa.Float(), nullable=False),
        sa.Column("seen_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_replicas")),
    )
    op.create_table(
        "task_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_task_events")),
    )
    with op.batch_alter_table("task_events", schema=None) as batch_op:
        batch_op.create_index("ix_task_events_task_id", ["task_id"], unique=False)

    op.create_table(
        "task_starts",
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_task_starts")),
    )
    op.create_table(
        "tasks",
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("environment", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=512), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("due_s", sa.Float(), nullable=False),
        sa.Column("since_s", sa.Float(), nullable=False),
        sa.Column("start_limit_s", sa.Float(), nullable=False),
        sa.Column("start_consumed_s", sa.Float(), nullable=False),
        sa.Column("idle_limit_s", sa.Float(), nullable=False),
        sa.Column("idle_consumed_s", sa.Float(), nullable=False),
        sa.Column("turn_limit_s", sa.Float(), nullable=False),
        sa.Column("turn_consumed_s", sa.Float(), nullable=False),
        sa.Column("active_limit_s", sa.Float(), nullable=False),
        sa.Column("active_consumed_s", sa.Float(), nullable=False),
        sa.Column("end_limit_s", sa.Float(), nullable=False),
        sa.Column("end_consumed_s", sa.Float(), nullable=False),
        sa.Column("instance", sa.String(length=128), nullable=False),
        sa.Column("peer_task", sa.String(length=128), nullable=False),
        sa.Column("released", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("outcome", sa.LargeBinary(), nullable=True),
        sa.Column("metrics", sa.LargeBinary(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("owner", "key", "attempt", name=op.f("uq_tasks_owner_key_attempt")),
    )
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.create_index("ix_tasks_due_s", ["due_s"], unique=False)
        batch_op.create_index("ix_tasks_owner_task_id", ["owner", "task_id"], unique=False)

    op.create_table(
        "turns",
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("turn", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("action", sa.LargeBinary(), nullable=False),
        sa.Column("acted_s", sa.Float(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("answered_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("task_id", "turn", name=op.f("pk_turns")),
    )


def downgrade() -> None:

    op.drop_table("turns")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_index("ix_tasks_owner_task_id")
        batch_op.drop_index("ix_tasks_due_s")

    op.drop_table("tasks")
    op.drop_table("task_starts")
    with op.batch_alter_table("task_events", schema=None) as batch_op:
        batch_op.drop_index("ix_task_events_task_id")

    op.drop_table("task_events")
    op.drop_table("replicas")
    op.drop_table("instances")
