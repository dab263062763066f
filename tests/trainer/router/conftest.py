"""Model folders with real kinds of tokenizers and templates, an engine that says what it is told, and a router app."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from chat_models import FAMILIES, make_chat_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tide_trainer import types
from tide_trainer.images import ImageStore
from tide_trainer.router.app import RouterApp
from tide_trainer.router.calls import Calls
from tide_trainer.router.control import Control
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.sessions import read_segment
from tide_trainer.router.state import Limits

SPECIALS = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|stop|>",
    "<|eot|>",
]
WORDS = ["go", "left", "right", "forward", "you", "see", "a", "red", "ball", "door", "task", "yes"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0]['role'] == 'system' %}"
    "{{- messages[0]['content'] }}{%- endif %}{{- '\\n\\n# Tools' }}{%- for tool in tools %}{{- '\\n' }}"
    "{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role != 'tool' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' + '\\n' }}{%- else %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools' }}{%- for tool in tools %}{{- '\\n' }}"
    "{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content or '' %}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start|>' + m.role + '<|stop|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
WORD = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen": (QWEN, "<|im_end|>"),
    "tools": (TOOLS, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "llama": (LLAMA, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
}


def _folder(path: Path, tokenizer: Tokenizer, template: str, eos: str, bos: str | None) -> Path:
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    config |= {"bos_token": bos} if bos else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(eos)}))
    return path


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    corpus = [
        " ".join(rng.choices([*WORDS, "aaaa", "hello", "<think>", "</think>", "user", "\n"], k=20)) for _ in range(300)
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    """As Llama 2 and Mistral have it: whatever text comes first gets a space before it."""
    vocabulary = {text: i for i, text in enumerate(["<unk>", *SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), "▁"])}
    for letter in "abcdefghijklmnopqrstuvwxyz!":
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def _word() -> Tokenizer:
    specials = ["<pad>", "<unk>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*specials, *WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(specials)
    return tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {"word": _folder(root / "word", _word(), WORD, "<end>", None)}
    bpe = _bpe()
    for name, (template, eos) in TEMPLATES.items():
        found[name] = _folder(root / name, bpe, template, eos, "<s>")
    found["metaspace"] = _folder(root / "metaspace", _metaspace(), MISTRAL, "</s>", "<s>")
    return found


@pytest.fixture(scope="session")
def renderers(folders: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def chat_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {name: make_chat_model(root / name, name) for name in FAMILIES}


@pytest.fixture(scope="session")
def chats(chat_folders: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer(folder) for name, folder in chat_folders.items()}


@dataclass
class ScriptedEngine:
    """Answers with what `say` gives for a prompt, and remembers what it was sent and sampled."""

    say: Callable[[list[int]], Any]
    sent: list[list[int]] = field(default_factory=list)
    images: list[tuple[types.ImageSpan, ...]] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[types.Sampling] = field(default_factory=list)
    closed: bool = False

    async def generate(
        self, prompt_ids, sampling, *, request_id=None, priority=0, timeout_s=None, images=()
    ) -> types.Completion:
        self.sent.append(list(prompt_ids))
        self.images.append(tuple(images))
        self.samplings.append(sampling)
        said = self.say(prompt_ids)
        said = await said if asyncio.iscoroutine(said) else said
        if isinstance(said, types.Completion):
            return said
        ids = tuple(said)
        self.sampled.append(ids)
        return types.Completion(ids, tuple(-0.25 for _ in ids), 0, "stop", version=5)

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class Router:
    """The router's parts in one process, with a main process that grants what `grants` says."""

    renderer: Renderer
    limits: Limits = field(default_factory=lambda: Limits(hold_timeout_s=20.0))
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    auto_rank: str | None = "r0"
    images: ImageStore | None = None

    def __post_init__(self) -> None:
        self.calls = Calls(self.renderer, self.notify, self.limits, "policy", self.images)
        self.engines: dict[str, ScriptedEngine] = {}
        self.control = Control(
            self.renderer, self.calls, self.limits, lambda: 0.0, lambda url, token: self.engines[url]
        )
        self.app = RouterApp(self.control, self.calls, self.renderer, self.notify, self.limits, "policy")

    def notify(self, name: str, payload: dict[str, Any]) -> None:
        json.dumps(payload)
        self.events.append((name, payload))
        if name == "call" and self.auto_rank is not None:
            asyncio.get_running_loop().call_soon(self.grant, payload["call"])

    def grant(self, call: str, rank: str | None = None) -> None:
        self.control.grant({"call": call, "rank": rank or self.auto_rank, "version": 5})

    def engine(self, say: Callable[[list[int]], Any], rank: str = "r0") -> ScriptedEngine:
        self.engines[rank] = ScriptedEngine(say)
        self.control.rank({"rank": rank, "url": rank})
        return self.engines[rank]

    def open(
        self, session: str = "s", max_context_tokens: int = 2000, max_new_tokens: int = 16, kind: str = "train"
    ) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "kind": kind}
        data = {"session": session, "api_key": "key-of-" + session, "sampling": sampling}
        self.control.open(data | {"max_context_tokens": max_context_tokens})

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    async def call(self, method: str, path: str, body: Any = None, *, key: str = "key-of-s", gone=None, **headers: str):
        """One ASGI request; `gone` is an event that stands for the client's going away."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in pairs.items()],
        }
        requests = iter([{"type": "http.request", "body": raw, "more_body": False}])
        sent: list[Any] = []

        async def receive():
            for message in requests:
                return message
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await asyncio.wait_for(self.app(scope, receive, send), 30)
        if not sent:
            return None, None
        return sent[0]["status"], b"".join(message["body"] for message in sent[1:])

    async def chat(self, messages: list[dict[str, Any]], session: str = "s", gone=None, headers=None, **options: Any):
        body = {"model": "policy", "messages": messages, **options}
        path = f"/sessions/{session}/v1/chat/completions"
        status, data = await self.call("POST", path, body, key="key-of-" + session, gone=gone, **(headers or {}))
        return status, None if data is None else json.loads(data)


@pytest.fixture
def router(renderers: dict[str, Renderer]) -> Router:
    return Router(renderers["chatml"])


@pytest.fixture
def user() -> Callable[[str], dict[str, str]]:
    return lambda text: {"role": "user", "content": text}


class ServedRouter(Router):
    """The same behind a real HTTP server on the loopback address."""

    async def start(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self.app, http="httptools", ws="none", lifespan="off", log_config=None)
        self.server = uvicorn.Server(config)
        self.serving = asyncio.create_task(self.server._serve([listener]))

    async def stop(self) -> None:
        self.app.close()
        self.server.should_exit = True
        await asyncio.wait_for(self.serving, 10)

    def base_url(self, session: str = "s") -> str:
        return f"{self.url}/sessions/{session}/v1"

    def says(self, *texts: str) -> ScriptedEngine:
        """An engine that says these, one after the other, the last one again and again."""
        left = [[*self.renderer.encode_after(text), *self.renderer.stop_token_ids] for text in texts]
        engine = self.engines.get("r0") or self.engine(lambda _: [])
        engine.say = lambda _: left.pop(0) if len(left) > 1 else left[0]
        return engine

    def grant_all(self) -> None:
        """Grant what waits, and what asks from now on."""
        self.auto_rank = "r0"
        for call in list(self.calls._held):
            self.grant(call)

    async def until(self, name: str, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while self.names().count(name) < count:  # noqa: ASYNC110 - the router sets no event for a test
                await asyncio.sleep(0.005)

    def captured(self, session: str = "s") -> tuple[list[types.Segment], dict[str, Any]]:
        """What a session captured, and its account."""
        account = self.control.close({"session": session})
        return [read_segment(data) for data in account["segments"]], account


@pytest.fixture
async def served(renderers: dict[str, Renderer]):
    """A router with a model that calls tools; it keeps held streams alive every 0.05 s."""
    served = ServedRouter(renderers["tools"], Limits(hold_timeout_s=20.0, keep_alive_s=0.05))
    await served.start()
    yield served
    await served.stop()
