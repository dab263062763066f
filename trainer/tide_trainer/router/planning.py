"""What a call becomes before it is announced: a prompt that continues what was captured, and how to sample."""

from __future__ import annotations

from tide_trainer import types
from tide_trainer.images import check_spans
from tide_trainer.router.openai_wire import ApiError, ChatRequest, CompletionRequest
from tide_trainer.router.renderer import Renderer, RenderError
from tide_trainer.router.sessions import PlannedTurn, PromptTooLong
from tide_trainer.router.state import Limits, Session


def plan_call(
    session: Session, request: ChatRequest | CompletionRequest, renderer: Renderer, limits: Limits
) -> tuple[PlannedTurn, types.Sampling]:
    """What the engine is to be given, and how it is to sample.

    Raises:
        ApiError: 400, what was asked for cannot be sampled, does not fit, or would not be trained as it was sampled.
    """
    temperature = _temperature(session, request)
    where = "prompt" if isinstance(request, CompletionRequest) else "messages"
    try:
        turn = _planned(session, request, renderer)
    except RenderError as error:
        raise ApiError(400, "template_refused", str(error), param=where) from error
    except PromptTooLong as error:
        raise _too_long(session, str(error), where) from error
    check_images(turn, renderer)
    prompt_tokens = len(turn.prompt_ids)
    room = session.max_context_tokens - prompt_tokens
    # A limit that the agent set itself is kept or refused; the session's own is cut to what is left.
    max_new = request.max_new_tokens or min(session.sampling.max_new_tokens, room)
    if max_new > room or room < 1:
        raise _too_long(session, f"{prompt_tokens}", where, f" and {max(max_new, 1)} to be sampled")
    if prompt_tokens == 0:
        raise ApiError(400, "invalid_value", f"the {where} render to no token at all", param=where)
    if session.capture.num_tokens + prompt_tokens > limits.max_session_tokens:
        raise ApiError(400, "session_too_long", "the session has captured as many tokens as it may")
    stop_ids = session.sampling.stop_token_ids or renderer.stop_token_ids
    if request.stop:
        single = (renderer.single_token(word) for word in request.stop)
        stop_ids = tuple({*stop_ids, *(token_id for token_id in single if token_id is not None)})
    return turn, types.Sampling(temperature, max_new, stop_ids)


def _too_long(session: Session, much: str, where: str, more: str = "") -> ApiError:
    words = f"the context holds {session.max_context_tokens} tokens: {much} in the {where}{more} are too many"
    return ApiError(400, "context_length_exceeded", f"{words}; shorten the {where}", param=where)


def check_images(turn: PlannedTurn, renderer: Renderer) -> None:
    """Look once more that each image has its placeholder ids: an engine that counts others would see other pixels.

    Raises:
        ApiError: 500, naming the place; nothing of it was sampled.
    """
    if renderer.images is None:
        return
    try:
        check_spans(turn.prompt_ids, turn.images, renderer.images.placeholder_id)
    except ValueError as error:
        words = f"the router's prompt does not fit its images: {error}"
        raise ApiError(500, "images_differ", words, kind="server_error") from error


def _planned(session: Session, request: ChatRequest | CompletionRequest, renderer: Renderer) -> PlannedTurn:
    if isinstance(request, ChatRequest):
        messages = request.messages
        if not renderer.knows_developer:  # OpenAI's newer name of the system role
            messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
        return session.capture.plan(messages, request.tools, read_calls=request.read_calls)
    if isinstance(request.prompt, str):
        return session.capture.plan_text(request.prompt)
    return session.capture.plan_ids(request.prompt)


def _temperature(session: Session, request: ChatRequest | CompletionRequest) -> float:
    """The session's; what is trained must have been sampled from what the log-probs are of."""
    wanted, own = request.temperature, session.sampling.temperature
    if session.training and wanted is not None and wanted != own:
        words = f"temperature {wanted:g} cannot be trained: this session's is {own:g}, and so are its log-probs"
        raise ApiError(400, "unsupported_value", f"{words}; leave temperature out", param="temperature")
    return own
