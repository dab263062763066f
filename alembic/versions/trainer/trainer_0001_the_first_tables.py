"""The first tables: runs, groups, trajectories, train steps, rank roles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "trainer_0001"
down_revision = None
branch_labels = None
depends_on = None


def _run() -> sa.Column[str]:
    return sa.Column("run", sa.String(64), sa.ForeignKey("runs.run"), primary_key=True)


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("model_version", sa.Integer, nullable=False),
        sa.Column("config_json", sa.Text, nullable=False),
        sa.Column("started_at_s", sa.Float, nullable=False),
        sa.Column("ended_at_s", sa.Float),
    )
    op.create_table(
        "groups",
        _run(),
        sa.Column("uid", sa.String(128), primary_key=True),
        sa.Column("environment", sa.String(128), nullable=False),
        sa.Column("seed", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("buffer_version", sa.Integer),
        sa.Column("payload_hash", sa.String(64)),
    )
    op.create_index("ix_groups_run_status", "groups", ["run", "status"])
    op.create_table(
        "trajectories",
        _run(),
        sa.Column("uid", sa.String(160), primary_key=True),
        sa.Column("group", sa.String(128), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("reward", sa.Float),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_index("ix_trajectories_group", "trajectories", ["group"])
    op.create_table(
        "train_steps",
        _run(),
        sa.Column("model_version", sa.Integer, primary_key=True),
        sa.Column("metrics_json", sa.Text, nullable=False),
        sa.Column("ended_at_s", sa.Float, nullable=False),
    )
    op.create_table(
        "rank_roles",
        _run(),
        sa.Column("rank", sa.String(64), primary_key=True),
        sa.Column("model_version", sa.Integer, primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
    )


def downgrade() -> None:
    for table in ("rank_roles", "train_steps", "trajectories", "groups", "runs"):
        op.drop_table(table)
