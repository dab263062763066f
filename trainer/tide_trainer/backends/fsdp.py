"""The training backend on torch FSDP2: the main process's half. It imports no torch.

    train(batch) -> plan of micro-batches -> one request to every rank -> metrics combined -> TrainReport
    ranks: `fsdp_rank` processes; gloo on CPU, NCCL on GPU; with one rank nothing is sharded and no group exists

Every call to the ranks has a deadline. The first failure ends the backend: a rank that missed a collective cannot be
trusted, so later calls raise BackendFailed and the caller starts anew from a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tide_trainer import types
from tide_trainer.backends.engine_process import Child, Spawner
from tide_trainer.backends.micro_batches import plan_micro_batches
from tide_trainer.backends.training_wire import (
    FsdpSettings,
    RankSettings,
    check_sequence,
    combine,
    pack,
    pack_images,
)
from tide_trainer.backends.whole_files import existing
from tide_trainer.channel import Channel, ChannelError, ChannelServer, PeerError, serve_channel
from tide_trainer.errors import BackendFailed, ConfigurationError, ImageFailed
from tide_trainer.images import ImageStore, ImageTokens, check_spans

_STOP_S = 8.0
T = TypeVar("T")


class FsdpBackend:
    """`protocols.TrainingBackend` over rank processes. Calls are served one at a time, in order.

    Cancelling a call leaves it running in the ranks; the next call waits for its end.

    Args:
        settings: the model, the optimizer, the loss, and the ranks.
        processes: starts and ends the rank processes.
        name: prefix of the processes' names.
    """

    def __init__(self, settings: FsdpSettings, processes: Spawner, *, name: str = "actor") -> None:
        if settings.loss.needs_reference:
            fix = "must be 0: this backend holds no reference model"
            raise ConfigurationError("algorithm.loss.kl_coefficient", fix)
        self._settings = settings
        self._processes = processes
        self._name = name
        self._children: list[Child] = []
        self._channels: dict[int, Channel] = {}
        self._server: ChannelServer | None = None
        self._folder: Path | None = None
        self._placeholder_id: int | None = None
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._failure = "the training backend is not started"

    @property
    def children(self) -> tuple[Any, ...]:
        """The ranks' processes as the spawner gave them, rank 0 first; their CPU time is measured there."""
        return tuple(self._children)

    async def start(self, checkpoint: str | None = None) -> int:
        """Boots the ranks; returns the model version. Cancelling or failing ends them.

        Args:
            checkpoint: a folder of `save`, or any Hugging Face model folder (version 0); None: the settings' model.

        Raises:
            ConfigurationError: there is no such folder.
            BackendFailed: a rank died or was late; the message ends with the tail of its log.
        """
        if self._children:
            raise BackendFailed("the training backend is started already")
        folder = existing(checkpoint or self._settings.model)
        tokens = ImageTokens.read(folder)
        self._placeholder_id = tokens.placeholder_id if tokens else None
        checkpoint = None if checkpoint is None else folder
        try:
            async with asyncio.timeout(self._settings.boot_timeout_s):
                await self._spawn()
            self._failure = ""
            body = {"checkpoint": checkpoint}
            answers = await self._ask("boot", [body] * self._settings.num_ranks, self._settings.boot_timeout_s)
        except TimeoutError:
            detail = self._tails()
            await self.stop()
            raise BackendFailed(f"ranks not up within {self._settings.boot_timeout_s:g} s\n{detail}") from None
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        return int(answers[0]["version"])

    async def train(self, batch: types.TrainBatch) -> types.TrainReport:
        """One optimizer update; see `protocols.TrainingBackend`.

        Raises:
            ValueError: a sequence's parts do not fit together.
            ImageFailed: an image is not in the store.
            BackendFailed: a rank died, was late, or the gradient is not finite (then nothing was changed).
        """
        began = time.monotonic()
        for index, sequence in enumerate(batch.sequences):
            check_sequence(sequence, index, self._placeholder_id)
        self._check_stored(sequence.images for sequence in batch.sequences)
        packed = [pack(sequence) for sequence in batch.sequences]
        packed = [sequence for sequence in packed if sequence["trained"]]
        num_tokens = sum(len(sequence["trained"]) for sequence in packed)
        if not num_tokens:
            return types.TrainReport(0, 0, 0.0, 0.0, {"loss": 0.0, "grad_norm": 0.0})
        common = {
            "objective": batch.objective,
            "num_tokens": num_tokens,
            "num_sequences": len(packed),
            "learning_rate": batch.learning_rate,
            "any_images": any("images" in sequence for sequence in packed),
        }
        bodies = [{**common, "micro_batches": share} for share in self._shares(packed)]
        answers = await self._ask("train", bodies, self._settings.timeout_s)
        metrics = combine(answers, num_tokens)
        rate = batch.learning_rate or self._settings.learning_rate
        metrics |= {"grad_norm": answers[0]["grad_norm"], "learning_rate": rate}
        cpu_s = sum(answer["cpu_s"] for answer in answers)
        return types.TrainReport(len(packed), num_tokens, time.monotonic() - began, cpu_s, metrics)

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[types.ImageSpan]] = ()
    ) -> list[list[float]]:
        """Log-probs at the present weights; see `protocols.TrainingBackend`."""
        spans = images or [()] * len(sequences)
        for ids, mine in zip(sequences, spans, strict=True):
            check_spans(ids, mine, self._placeholder_id)
        self._check_stored(spans)
        packed: list[dict[str, Any]] = [
            {"ids": list(ids), "trained": list(range(1, len(ids))), "index": index, "images": pack_images(mine)}
            for index, (ids, mine) in enumerate(zip(sequences, spans, strict=True))
            if len(ids) > 1
        ]
        found = [[0.0] * len(ids) for ids in sequences]
        if not packed:
            return found
        shares = self._shares(packed)
        any_images = any(sequence["images"] for sequence in packed)
        bodies = [{"micro_batches": share, "any_images": any_images} for share in shares]
        answers = await self._ask("score", bodies, self._settings.timeout_s)
        for share, logprobs in zip(shares, answers, strict=True):
            order = [sequence["index"] for micro_batch in share for sequence in micro_batch]
            # An empty micro-batch answers nothing; the ids' own order is the plan's.
            for index, values in zip(order, logprobs, strict=True):
                found[index][1:] = values
        return found

    async def publish(self, version: int) -> types.WeightUpdate:
        """Writes the present weights as `version`; see `protocols.TrainingBackend`."""
        body = {"version": version, "directory": self._settings.publish_directory}
        answers = await self._ask("publish", [body] * self._settings.num_ranks, self._settings.timeout_s)
        return types.WeightUpdate(version, answers[0]["path"], answers[0]["checksums"])

    async def save(self, directory: str, extra: Mapping[str, str]) -> None:
        """Writes a checkpoint; see `protocols.TrainingBackend`. The one before stays as `directory.previous`."""
        body = {"directory": directory, "extra": dict(extra)}
        await self._ask("save", [body] * self._settings.num_ranks, self._settings.timeout_s)

    async def stop(self) -> None:
        """Ends the ranks' processes within 10 s; safe to call twice and before `start`."""
        self._failure = "the training backend is stopped"
        for channel in self._channels.values():
            channel.close()
        children, self._children = self._children, []
        await asyncio.gather(*(self._processes.stop(child, _STOP_S) for child in children))
        for task in self._running:
            task.cancel()
        self._channels = {}
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _check_stored(self, images: Iterable[Sequence[types.ImageSpan]]) -> None:
        """Raises ImageFailed for an image that is not there: a rank that finds it missing would leave the others."""
        store = ImageStore(self._settings.image_folder)
        for digest in sorted({span.digest for spans in images for span in spans}):
            if not self._settings.image_folder or not store.path(digest).is_file():
                raise ImageFailed(f"image {digest} is not in the image store {self._settings.image_folder!r}")

    def _shares(self, packed: Sequence[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
        """Rank -> micro-batches -> sequences."""
        plan = plan_micro_batches(
            [len(sequence["ids"]) for sequence in packed],
            num_ranks=self._settings.num_ranks,
            max_tokens=self._settings.micro_batch_tokens,
        )
        return [[[packed[index] for index in micro_batch] for micro_batch in share] for share in plan]

    async def _spawn(self) -> None:
        """Starts every rank and waits until each has connected; the caller sets the deadline."""
        settings = self._settings
        self._folder = folder = Path(tempfile.mkdtemp(prefix="tide-actor-"))
        ready = [asyncio.get_running_loop().create_future() for _ in range(settings.num_ranks)]

        def on_connect(channel: Channel) -> None:
            rank = int(channel.peer)
            self._channels[rank] = channel
            channel.handle("ready", lambda _: ready[rank].done() or ready[rank].set_result(None))

        self._server = await serve_channel(folder / "ranks.sock", on_connect)
        for rank in range(settings.num_ranks):
            file = folder / f"rank{rank}.json"
            RankSettings(settings, rank, str(folder / "ranks.sock"), str(folder / "rendezvous")).write(file)
            argv = [sys.executable, "-m", "tide_trainer.backends.fsdp_rank", "--settings", str(file)]
            self._children.append(await self._processes.spawn(f"{self._name}-{rank}", argv, env=self._environment()))
        await self._or_death(asyncio.gather(*ready))

    def _environment(self) -> dict[str, str]:
        threads = str(self._settings.num_threads)
        # All ranks are on this machine: their collectives need no other interface.
        local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **local, **offline}

    async def _ask(self, name: str, bodies: Sequence[Any], timeout_s: float) -> list[Any]:
        """The same request to every rank, one at a time over all callers; goes on when the caller is cancelled."""
        task = asyncio.ensure_future(self._ask_now(name, bodies, timeout_s))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A caller that went away does not collect the failure; the next call reports it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise BackendFailed(f"{name}: {self._failure}") from None
            raise

    async def _ask_now(self, name: str, bodies: Sequence[Any], timeout_s: float) -> list[Any]:
        async with self._lock:
            if self._failure:
                raise BackendFailed(f"{name}: {self._failure}")
            requests = [
                asyncio.ensure_future(self._channels[rank].request(name, body, timeout_s=timeout_s))
                for rank, body in enumerate(bodies)
            ]
            try:
                return list(await asyncio.gather(*requests))
            except ChannelError as error:
                if isinstance(error, PeerError) and error.code == "not_finite":
                    await asyncio.gather(*requests, return_exceptions=True)
                    raise BackendFailed(f"{name}: {error.message}") from error
                self._failure = f"an earlier call failed ({name}: {error}); start anew from a checkpoint"
                raise BackendFailed(f"{name}: {error}\n{self._tails()}") from error
            finally:
                for request in requests:
                    request.cancel()

    async def _or_death(self, wanted: Awaitable[T]) -> T:
        """Waits for `wanted`; the end of any rank's process raises BackendFailed."""
        task = asyncio.ensure_future(wanted)
        deaths = [asyncio.ensure_future(child.wait_dead()) for child in self._children]
        try:
            await asyncio.wait([task, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            rank = next(rank for rank, death in enumerate(deaths) if death.done())
            code = deaths[rank].result()
            raise BackendFailed(f"rank {rank} ended with exit code {code}\n{self._children[rank].tail()}")
        finally:
            for waiting in [task, *deaths]:
                waiting.cancel()

    def _tails(self) -> str:
        return "\n".join(f"log of rank {rank}:\n{child.tail()}" for rank, child in enumerate(self._children))


def publish_directory(name: str) -> str:
    """A folder for published versions: on a tmpfs where the machine has one, else a temporary folder."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a tmpfs, and mkdtemp is private
    with contextlib.suppress(OSError):
        return tempfile.mkdtemp(prefix=f"tide-{name}-", dir=root)
    return tempfile.mkdtemp(prefix=f"tide-{name}-")
