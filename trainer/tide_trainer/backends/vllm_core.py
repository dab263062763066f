"""vLLM's engine core inside the server process: one thread runs it, the event loop talks to it.

    event loop: generate -> [commands] -> engine thread: add, schedule, forward, collect -> finished calls -> event loop

    consumes: commands, between two forward passes.      waits for: a command, while it has no request.
    unblocked by: the next call, an abort, an update.    back-pressure: vLLM's own queue behind `max_running`.

vLLM's usual front (API process, core process, worker process) costs 2.4 to 3 ms CPU for a turn of two new tokens of a
tiny model; this process costs 0.6 to 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tide_trainer import types
from tide_trainer.backends.vllm_calls import Call, fail, resolve
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.engine_client import EngineHealth
from tide_trainer.errors import EngineFailed, EngineRefused, WeightsDiffer

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_STOP_S = 3.0
_LAST_ANSWERS_S = 0.3
_EXIT_BROKEN = 70


class VllmCore:
    """A `ServedEngine` (see `engine_app`) over vLLM's V1 engine core. Belongs to the event loop that starts it."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[str, Call] = {}
        self._in_flight: set[str] = set()
        self._loading: set[str] = set()
        self._version = settings.version
        self._blocked = "the engine boots"
        self._reason = "updating"
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._core: Any = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopped = threading.Event()

    async def start(self) -> None:
        """Boots the engine in its thread. Raises what the boot raised."""
        self._loop = asyncio.get_running_loop()
        self._booted: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._booted

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: types.Sampling,
        priority: int,
        images: Sequence[types.ImageSpan] = (),
    ) -> types.Completion:
        """Samples one completion; see `engine_app.ServedEngine`. Cancelling aborts it in the engine."""
        if self._blocked:
            raise EngineRefused(self._blocked, reason=self._reason)
        if request_id in self._in_flight:
            raise EngineRefused(f"request {request_id!r} is in flight already", reason="duplicate")
        if max(prompt_ids) >= self._vocabulary:
            raise EngineRefused(
                f"prompt_ids: {max(prompt_ids)} is outside the vocabulary of {self._vocabulary}", reason="invalid"
            )
        self._in_flight.add(request_id)
        self._loading.add(request_id)
        try:
            features = await self._images.features(prompt_ids, images)
            if request_id not in self._loading:
                return types.Completion((), (), 0, "abort", self._version)
            request = self._requests.make(request_id, prompt_ids, sampling, priority, features)
            call = Call(request, self._loop.create_future())
            self._commands.put(lambda: self._add(call))
            return await call.future
        except asyncio.CancelledError:
            self._commands.put(lambda: self._abort([request_id]))
            raise
        finally:
            self._in_flight.discard(request_id)
            self._loading.discard(request_id)

    async def update_weights(self, update: types.WeightUpdate) -> int:
        """Loads and proves a version between two forward passes; see `engine_app.ServedEngine`."""
        if update.version <= self._version:
            raise EngineRefused(f"version {update.version} is not above {self._version}", reason="not_newer")
        if self._reason == "updating" and self._blocked:
            raise EngineRefused(self._blocked, reason="updating")
        if self._in_flight:
            raise EngineRefused(f"{len(self._in_flight)} calls are in flight: drain them first", reason="busy")
        self._blocked, self._reason = f"version {update.version} is being loaded", "updating"
        try:
            num_tensors = await self._on_thread(lambda: self._replace(update))
        except BaseException:
            self._blocked, self._reason = "the last weight update failed: publish a good version", "no_weights"
            raise
        self._version = update.version
        self._blocked = ""
        return num_tensors

    def abort(self, request_ids: list[str]) -> int:
        """Ends calls in flight; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._in_flight]
        self._loading.difference_update(known)
        if known:
            self._commands.put(lambda: self._abort(known))
        return len(known)

    def stats(self) -> types.EngineStats:
        """The live numbers."""
        num_running, num_waiting, num_blocks = self._core.scheduler.counts() if self._core else (0, 0, 0)
        return types.EngineStats(
            version=self._version,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_used_tokens=num_blocks * self._settings.block_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._core.scheduler.num_preemptions if self._core else 0,
            num_cached_blocks=self._core.scheduler.num_cached_blocks() if self._core else 0,
        )

    async def requests(self) -> dict[str, tuple[int, int]] | None:
        """Request id -> (computed tokens, KV blocks held), read between two forward passes; None: unreadable."""
        return await self._on_thread(lambda: self._core.scheduler.live_requests())

    def health(self) -> EngineHealth:
        """What it serves now."""
        s = self._settings
        return EngineHealth(
            self._version,
            not self._blocked,
            s.num_blocks * s.block_tokens,
            s.block_tokens,
            s.max_context_tokens,
            self._blocked,
        )

    def stop(self) -> None:
        """Ends the engine thread, and waits for it at most 3 s. Calls in flight are lost. Idempotent."""
        self._commands.put(None)
        self._stopped.wait(_STOP_S)

    # --- the event loop's side -------------------------------------------------------------------------------------

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        future: asyncio.Future[_T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed to the waiting call
                self._loop.call_soon_threadsafe(fail, [future], error)
            else:
                self._loop.call_soon_threadsafe(resolve, [(future, result)])

        self._commands.put(run)
        return await future

    def _break(self, error: BaseException, futures: list[asyncio.Future[Any]]) -> None:
        self._blocked, self._reason = f"the engine broke: {error}", "failed"
        fail(futures, EngineFailed(self._blocked))
        # The last answers go out, then the process goes: a broken engine must look dead at once.
        self._loop.call_later(_LAST_ANSWERS_S, os._exit, _EXIT_BROKEN)

    # --- the engine thread's side ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._boot()
        except BaseException as error:  # noqa: BLE001 - handed to `start`
            self._loop.call_soon_threadsafe(fail, [self._booted], error)
            return
        self._blocked = ""
        self._loop.call_soon_threadsafe(resolve, [(self._booted, None)])
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - reported to every caller
            _LOG.exception("the engine broke")
            futures: list[asyncio.Future[Any]] = [call.future for call in self._calls.values()]
            self._loop.call_soon_threadsafe(self._break, error, futures)
        finally:
            self._stopped.set()

    def _boot(self) -> None:
        from tide_trainer.backends import vllm_build, vllm_images

        settings = self._settings
        self._images = vllm_images.PromptImages(settings.model_path, settings.image_folder, settings.max_image_bytes)
        self._core = vllm_build.build(settings, self._images.tokens)
        self._vocabulary = self._core.vllm_config.model_config.get_vocab_size()
        self._requests = vllm_build.Requests(self._core, self._images.forbidden_ids)

    def _serve(self) -> None:
        core, pace_s, began_s = self._core, self._settings.min_step_s, 0.0
        while True:
            if (arrived := self._obey(wait=not core.scheduler.has_requests())) is None:
                return  # without vLLM's own shutdown: it takes seconds, and the process ends now anyway
            # A forward pass costs over 1 ms before its first token: new calls wait a moment for company.
            if arrived and (wait_s := began_s + pace_s - time.monotonic()) > 0:
                time.sleep(wait_s)
                continue
            began_s = time.monotonic()
            outputs, executed = core.step_fn()
            core.post_step(executed)
            if outputs:
                self._collect(outputs[0].outputs)
            if lost := core.scheduler.take_lost():
                self._give_up(lost)

    def _obey(self, *, wait: bool) -> bool | None:
        """Carries out the commands that are there; True if there was one, None if it is time to stop."""
        commands, any_done = self._commands, False
        while wait or not commands.empty():
            command = commands.get()
            if command is None:
                return None
            command()
            wait, any_done = False, True
        return any_done

    def _add(self, call: Call) -> None:
        self._calls[call.request.request_id] = call
        self._core.add_request(call.request)

    def _abort(self, request_ids: list[str]) -> None:
        calls = [self._calls.pop(request_id) for request_id in request_ids if request_id in self._calls]
        self._core.abort_requests([call.request.request_id for call in calls])
        done = [(call.future, call.completion("abort", self._version)) for call in calls]
        self._loop.call_soon_threadsafe(resolve, done)

    def _give_up(self, lost: dict[str, str]) -> None:
        """Ends calls whose image cannot be read any more; the others go on."""
        calls = [self._calls.pop(request_id) for request_id in lost if request_id in self._calls]
        self._core.abort_requests([call.request.request_id for call in calls])
        for call in calls:
            error = EngineRefused(f"images: {lost[call.request.request_id]}", reason="invalid")
            self._loop.call_soon_threadsafe(fail, [call.future], error)

    def _collect(self, outputs: list[Any]) -> None:
        done: list[tuple[asyncio.Future[Any], Any]] = []
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            if output.new_token_ids:
                call.token_ids += output.new_token_ids
                # Column 0 is the sampled id's; the plain log-softmax, before temperature.
                call.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.prefill_stats is not None:
                call.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                del self._calls[output.request_id]
                self._prompt_tokens += call.request.num_prompt_tokens
                self._cached_tokens += call.cached_tokens
                self._generated_tokens += len(call.token_ids)
                done.append((call.future, call.completion(str(output.finish_reason), self._version)))
        if done:
            self._loop.call_soon_threadsafe(resolve, done)

    def _replace(self, update: types.WeightUpdate) -> int:
        core = self._core
        if self._calls or core.scheduler.has_unfinished_requests():
            raise EngineRefused("the engine still runs requests", reason="busy")
        (num_tensors,) = core.collective_rpc("tide_load_weights", args=(update.path, dict(update.checksums)))
        # vLLM refuses a reset while a request holds blocks, and says so by False only.
        if not core.reset_prefix_cache() or core.scheduler.num_cached_blocks() != 0:
            raise WeightsDiffer("vLLM did not reset its prefix cache: it holds blocks of an older version")
        core.reset_mm_cache()
        core.reset_encoder_cache()
        if core.collective_rpc("tide_num_encoded_images") != [0] or core.scheduler.num_cached_images() != 0:
            raise WeightsDiffer("vLLM did not reset its encoder cache: it holds images as an older version saw them")
        return num_tensors
