from __future__ import annotations

import pytest

from tide_sdk.errors import TideError
from tide_sdk.outcomes import classify


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"kind": "failed", "reason": "environment_lost"}, "environment_failed"),
        ({"kind": "aborted", "reason": "the caller's"}, "aborted"),
        (None, "aborted"),
        ("nonsense", "aborted"),
    ],
)
def test_a_task_that_ended_because_its_environment_failed_is_no_abort(outcome, expected):
    assert classify(TideError("ended", "the task has ended", outcome=outcome)) == expected
