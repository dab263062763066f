"""Messages to text to token ids, as the model's own folder says; without importing transformers.

The output equals `transformers`' `apply_chat_template` (a test compares them). Importing that library costs 2.7 CPU
seconds and 330 MB in this process; `tokenizers` and `jinja2` alone cost 0.05 and 20.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from tide_trainer.errors import ConfigurationError
from tide_trainer.images import ImageTokens
from tide_trainer.router.reply_format import THINK_CLOSE, THINK_OPEN, detect_format, shown_messages
from tide_trainer.router.tool_calls import FORMATS

MAX_TOKEN_ID = 2**32
"""The tokenizer's own type ends here."""


class RenderError(ValueError):
    """The chat template refused the messages; the words are the template's own."""


# What a template may do with messages that it was not made for.
_REFUSALS = (jinja2.TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for other tools; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Renderer:
    """Renders and tokenises with one model folder; pure after construction.

    Args:
        model_dir: holds tokenizer.json, tokenizer_config.json and the chat template (in it or in chat_template.jinja).
        tool_format: how tool calls are written, one of `reply_format.TOOL_FORMATS`.
        reasoning_format: how thinking is marked, one of `reply_format.REASONING_FORMATS`.

    Attributes:
        stop_token_ids: ids that end a reply, from generation_config.json, config.json and the tokenizer.
        format: what the model's replies may hold.
        images: how the model writes images; None for a model without.
        knows_developer: the template has the role developer; others drop or refuse such messages.

    Raises:
        ConfigurationError: a file is missing or cannot be read, or a format is unknown.
    """

    def __init__(self, model_dir: str | Path, *, tool_format: str = "auto", reasoning_format: str = "auto") -> None:
        folder = Path(model_dir)
        config = _read_json(folder / "tokenizer_config.json", required=True)
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigurationError("model.path", f"{folder}/tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.images = ImageTokens.read(folder) if (folder / "config.json").is_file() else None
        self._special = _special_tokens(folder, config)
        template = _template_text(folder, config)
        self._template = _compile(template)
        self.knows_developer = "developer" in template
        self.stop_token_ids = self._stop_ids(folder)
        eos = self._special.get("eos_token")
        self._anchor = eos if isinstance(eos, str) and self._is_one_token(eos) else ""
        self._anchor_id = self.encode(self._anchor)[0] if self._anchor else -1
        stop_texts = [self.token_text(token_id) for token_id in self.stop_token_ids]
        self.format = detect_format(self._probe, template, stop_texts, tool_format, reasoning_format)
        thinking = (THINK_OPEN, THINK_CLOSE) if self.format.reasoning == "think" else ()
        calls = FORMATS[self.format.tools].markers if self.format.tools != "none" else ()
        self._special_ids = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._thinking_ids = self._special_among(thinking)
        self._marker_ids = self._thinking_ids | self._special_among(calls)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text; messages are as OpenAI has them. Raises RenderError if the template refuses it."""
        for message in messages:
            if "tool_calls" in message or message.get("content") is None:
                messages = shown_messages(messages, self.format)
                break
        return self._render(messages, tools, add_generation_prompt)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, prompt: bool
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._special,
            )
        except _REFUSALS as error:
            raise RenderError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a whole prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_after(self, text: str) -> list[int]:
        """The ids of text that follows other ids.

        It is encoded behind the end token, which is then cut off: some tokenizers put a space before whatever text
        comes first, and this text does not come first.
        """
        if not self._anchor:
            return self.encode(text)
        ids = self._tokenizer.encode(self._anchor + text, add_special_tokens=False).ids
        return ids[1:] if ids and ids[0] == self._anchor_id else self.encode(text)

    def decode(self, ids: Sequence[int], keep: frozenset[int] = frozenset()) -> str:
        """The text of sampled ids without special tokens but those to keep; bytes that are no UTF-8 become U+FFFD."""
        if keep.isdisjoint(ids):
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        left = [i for i in ids if i in keep or i not in self._special_ids]
        return self._tokenizer.decode(left, skip_special_tokens=False)

    def marker_ids(self, *, tools: bool) -> frozenset[int]:
        """Special tokens that mark thinking, and tool calls where there may be any."""
        return self._marker_ids if tools else self._thinking_ids

    def decode_after(self, ids: Sequence[int]) -> str:
        """The text of ids in their place behind others, special tokens included.

        Some tokenizers drop the space of whatever comes first; behind the end token nothing comes first.
        """
        if not self._anchor:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        text = self._tokenizer.decode([self._anchor_id, *ids], skip_special_tokens=False)
        return text.removeprefix(self._anchor)

    def token_text(self, token_id: int) -> str:
        """The text of one id, special or not; empty for an id that the tokenizer does not know."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def knows(self, token_id: int) -> bool:
        """True if the tokenizer has a token of that id."""
        return token_id < MAX_TOKEN_ID and self._tokenizer.id_to_token(token_id) is not None

    def single_token(self, text: str) -> int | None:
        """The id if the text is one token of its own, else None."""
        ids = self.encode_after(text)
        return ids[0] if len(ids) == 1 else None

    def _probe(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool
    ) -> str | None:
        try:
            return self._render(messages, tools, prompt)
        except RenderError:
            return None

    def _special_among(self, texts: Sequence[str]) -> frozenset[int]:
        """The ids of those texts that are special tokens."""
        found = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(i for i in found if i in self._special_ids)

    def _is_one_token(self, text: str) -> bool:
        return len(self.encode(text)) == 1

    def _stop_ids(self, folder: Path) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if isinstance(token_id, int):
                    found[token_id] = None
        eos = self._special.get("eos_token")
        if isinstance(eos, str) and (token_id := self._tokenizer.token_to_id(eos)) is not None:
            found[token_id] = None
        return tuple(found)


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if required:
            raise ConfigurationError("model.path", f"{path} is missing; name a Hugging Face model folder") from error
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError("model.path", f"{path} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Named special tokens, as the template sees them (`bos_token`, `eos_token`, ...)."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    found: dict[str, Any] = {}
    for name, value in merged.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_text(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    if not isinstance(template, str):
        raise ConfigurationError("model.path", f"{folder} has no chat template; add chat_template.jinja")
    return template


def _compile(text: str) -> jinja2.Template:
    """The environment of `transformers.utils.chat_template_utils`, option by option."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigurationError("model.path", f"its chat template is not valid: {error}") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
