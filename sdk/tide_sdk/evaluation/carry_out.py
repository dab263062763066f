"""Plays what an evaluation still misses, and stops where nothing works any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tide_sdk.evaluation.folder import EvaluationFolder
from tide_sdk.evaluation.records import Play, Record
from tide_sdk.many import Progress
from tide_sdk.pool import each

MAX_FAILED_IN_A_ROW = 20


class _NothingWorks(Exception):
    pass


async def carry_out(
    folder: EvaluationFolder,
    plays: Sequence[Play],
    play: Callable[[Play], Awaitable[Record]],
    *,
    concurrency: int,
    progress: Progress,
) -> str | None:
    """Play what is missing, each result being written as it comes; why it stopped early, None if it did not.

    It stops early after so many plays in a row without anything but failures of the infrastructure that the rest would
    end likewise; a resumed session plays them. Cancelling ends what runs, which then has no result.

    Args:
        folder: opened; holds the results so far.
        plays: all plays of the evaluation.
        play: plays one.
        concurrency: plays at once.
        progress: is told every result.

    Raises:
        EvaluationFailed: a result cannot be written.
    """
    num_failed = 0

    async def one(missing: Play) -> None:
        nonlocal num_failed
        record = await play(missing)
        folder.add(record)
        progress.add(record.outcome, record.reward)
        num_failed = 0 if record.final else num_failed + 1
        if num_failed >= max(MAX_FAILED_IN_A_ROW, 2 * concurrency):
            words = f"{num_failed} plays in a row failed, the last one: {record.outcome}: {record.error}"
            raise _NothingWorks(words)

    try:
        with progress:
            await each(folder.missing(plays), one, concurrency=concurrency)
    except _NothingWorks as error:
        return str(error)
    return None
