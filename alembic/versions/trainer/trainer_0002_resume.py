"""What a killed run goes on from: staleness entries, how often a prompt was sampled, the run's key at the gateway."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "trainer_0002"
down_revision = "trainer_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "staleness_entries",
        sa.Column("run", sa.String(64), sa.ForeignKey("runs.run"), primary_key=True),
        sa.Column("entry", sa.String(128), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("buffer", sa.Integer, nullable=False),
        sa.Column("occupied", sa.Boolean, nullable=False),
    )
    op.add_column("groups", sa.Column("sampling", sa.Integer, nullable=False, server_default="0"))
    op.add_column("runs", sa.Column("task_key", sa.String(128), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("num_resumes", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    # The release before knows no prompts that wait to be sampled again; it accounts for running ones at its end.
    op.execute("UPDATE groups SET status = 'running', reason = NULL WHERE status = 'waiting'")
    with op.batch_alter_table("runs") as table:
        table.drop_column("num_resumes")
        table.drop_column("task_key")
    with op.batch_alter_table("groups") as table:
        table.drop_column("sampling")
    op.drop_table("staleness_entries")
