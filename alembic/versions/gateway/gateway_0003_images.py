"""Images of observations: which task shows which, by the hash of their bytes.

Older answers keep their images in them, as they were stored.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "gateway_0003"
down_revision = "gateway_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "task_images",
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "digest", name=op.f("pk_task_images")),
    )
    op.create_index("ix_task_images_digest", "task_images", ["digest"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_task_images_digest", table_name="task_images")
    op.drop_table("task_images")
