"""The service over a real socket, with the real engine and a tiny random model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from engine.core import EngineCore
from engine.engine import Engine
from service.config.settings import Settings
from service.http.app import create_app
from service.http.connection import guarded_protocol
from service.http.limits import DEFAULT_LIMITS, HttpLimits
from service.http.server import Server, server_config
from service.runtime import EngineFactory, Runtime

Protocol = type[asyncio.Protocol]

NUM_LAYERS = 6
HIDDEN_SIZE = 32
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = len(BYTES), len(BYTES) + 1
VOCAB_SIZE = len(BYTES) + 2
CHAT_TEMPLATE = """\
{{ bos_token }}{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}\
{% if tools %}<{{ tools | tojson }}>{% endif %}{% for message in messages %}\
{% if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}\
[{{ message.role }}]{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %};\
{% endfor %}{% if add_generation_prompt %}[{{ speaker | default('assistant') }}]{% endif %}"""
MAX_MODEL_LEN = 256


@dataclass
class Service:
    """A running service and a client of it."""

    url: str
    client: httpx.Client
    runtime: Runtime
    root: Path
    model: str
    paths: Iterator[str] = field(default_factory=lambda: (f"file-{number}.safetensors" for number in range(10**6)))

    def complete(self, **body: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
        """Posts a completion; a short prompt and greedy sampling unless the body says otherwise."""
        # Escaped, unlike what httpx does: half a surrogate pair can be sent in this way only.
        content = json.dumps({"prompt": "Hello", "max_tokens": 4, "temperature": 0} | body)
        return self.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})

    def completed(self, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        response = self.complete(**body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refused(self, status: int, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        """The error of a completion that must be refused."""
        response = self.complete(**body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return error

    def events(self, **body: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - any JSON value
        """The events of a stream; asserts that it ends with [DONE], and that nothing but errors follows an error."""
        response = self.complete(stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert [number for number, line in enumerate(lines) if line == "[DONE]"] == [len(lines) - 1]
        events = [json.loads(line) for line in lines[:-1]]
        failed = ["error" in event for event in events]
        assert failed == sorted(failed)
        return events

    def chat(self, **body: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
        """Posts a chat completion; a short question and greedy sampling unless the body says otherwise."""
        known = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        return self.client.post("/v1/chat/completions", content=json.dumps(known | body), headers={"Content-Type": "application/json"})

    def chatted(self, **body: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        response = self.chat(**body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def send(self, **body: Any) -> socket.socket:  # noqa: ANN401 - any JSON value
        """Sends a completion on a connection of its own, which the caller closes whenever it likes."""
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + content)
        return connection

    def new_path(self) -> str:
        return next(self.paths)

    def record(self, save_id: str, wait: float | None = None) -> dict[str, Any]:
        """Of a save that has ended, or after some seconds of waiting for that."""
        while True:
            response = self.client.get(f"/saves/{save_id}", params={"wait": 60 if wait is None else wait})
            assert response.status_code == 200, response.text
            record: dict[str, Any] = response.json()
            if wait is not None or record["status"] not in ("queued", "running", "writing"):
                return record

    def settled(self) -> None:
        """Waits until the engine holds nothing, so that what a request has left behind can be looked at."""
        while not self.runtime.services(for_new_work=False).engine.wait_idle(1):
            pass


def make_tokenizer() -> Tokenizer:
    """One token per byte, and a begin token that the template adds."""
    vocab = {piece: index for index, piece in enumerate(BYTES)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose greedy text is varied, with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}))
    return folder


@contextmanager
def running_service(
    settings: Settings, runtime: Runtime, *, until_ready: bool, limits: HttpLimits = DEFAULT_LIMITS, protocol: Protocol = AutoHTTPProtocol
) -> Iterator[Service]:
    """Runs a service on a thread of its own until the block ends."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_app(settings, runtime, limits)
    server = Server(server_config(app, limits, http=guarded_protocol(limits, protocol)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), name="service-under-test")
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    runtime.on_fatal = lambda: setattr(server, "should_exit", True)
    try:
        with httpx.Client(base_url=url, timeout=None, trust_env=False) as client:
            while until_ready and client.get("/health").json()["status"] == "starting":
                assert not (app.state.start.done() and app.state.start.exception()), app.state.start.exception()
            yield Service(url, client, runtime, settings.save_root[0].resolve(), str(settings.served_model_name))
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Services:
    """Makes settings and services for a test."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model = model
        self._directory = directory

    def settings(self, **changes: Any) -> Settings:  # noqa: ANN401 - settings
        known: dict[str, Any] = {
            "model": str(self._model),
            "served_model_name": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "save_root": (self._directory / "saves",),
            "state_dir": self._directory / "state",
            "kv_cache_tokens": 4096,
            "state_cache_memory": 16 * 2**20,
            "threads": 1,
            "allowed_host": ("x",),  # what requests say that are written out
        }
        return Settings(**known | changes)

    @contextmanager
    def run(
        self,
        engine: EngineFactory = Engine,
        *,
        until_ready: bool = True,
        limits: HttpLimits = DEFAULT_LIMITS,
        protocol: Protocol = AutoHTTPProtocol,
        **changes: Any,  # noqa: ANN401 - settings
    ) -> Iterator[Service]:
        settings = self.settings(**changes)
        runtime = Runtime(settings, engine)
        with running_service(settings, runtime, until_ready=until_ready, limits=limits, protocol=protocol) as service:
            yield service

    def flags(self) -> list[str]:
        """What `strata serve` needs to run the same service as a process of its own."""
        settings = self.settings()
        flags = {"model": settings.model, "save-root": settings.save_root[0], "state-dir": settings.state_dir, "device": "cpu"}
        flags |= {"served-model-name": "tiny", "dtype": "float32", "kv-cache-tokens": 4096, "state-cache-memory": "16MiB", "threads": 1}
        return ["--port", "0", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def service(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests of a file."""
    with Services(model_folder, tmp_path_factory.mktemp("service")).run() as running:
        yield running


@pytest.fixture
def services(model_folder: Path, tmp_path: Path) -> Services:
    """For tests that need a service with settings of their own."""
    return Services(model_folder, tmp_path)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes at least 20 ms, so that a request can be caught while it runs."""
    step = EngineCore.step

    def slow_step(core: EngineCore) -> bool:
        time.sleep(0.02)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", slow_step)
