"""The process of one training rank: `python -m tide_trainer.backends.fsdp_rank --settings FILE`.

    main process --unix socket--> requests, one at a time --> FsdpWorker (torch) <--collectives--> other ranks

A request runs on the event loop's own thread and blocks it: a rank does one thing at a time. The process ends when the
channel closes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from typing import Any

from tide_trainer.backends.training_wire import RankSettings
from tide_trainer.channel import PeerError, connect_channel


def main() -> None:
    """Serves until the main process closes the channel."""
    parser = argparse.ArgumentParser(description="One training rank; started by the trainer.")
    parser.add_argument("--settings", required=True, help="file of RankSettings")
    asyncio.run(_serve(RankSettings.read(parser.parse_args().settings)))


async def _serve(place: RankSettings) -> None:
    channel = await connect_channel(place.socket, name=str(place.rank))
    # After the hello: the main process sees at once that the interpreter lives; torch takes seconds to import.
    from tide_trainer.backends import fsdp_worker
    from tide_trainer.backends.losses import Totals

    worker: Any = None

    def boot(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal worker
        worker = fsdp_worker.FsdpWorker(place)
        return {"version": worker.boot(body["checkpoint"])}

    def train(body: dict[str, Any]) -> dict[str, Any]:
        totals = Totals(body["num_tokens"], body["num_sequences"])
        try:
            return worker.train(
                body["objective"], body["micro_batches"], totals, body["learning_rate"], body["any_images"]
            )
        except fsdp_worker.NotFinite as error:
            raise PeerError("not_finite", str(error)) from error

    handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "boot": boot,
        "train": train,
        "score": lambda body: worker.score(body["micro_batches"], body["any_images"]),
        "publish": lambda body: worker.publish(body["version"], body["directory"]),
        "save": lambda body: worker.save(body["directory"], body["extra"]),
    }
    for name, handler in handlers.items():
        channel.handle(name, handler)
    channel.notify("ready", place.rank)
    await channel.wait_closed()
    # No leaving of the process group: the other ranks may be gone, and it would wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
