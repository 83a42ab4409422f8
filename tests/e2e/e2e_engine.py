"""The test's side of one real engine process, and what it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("engine_child.py")
BLOCK_TOKENS = 32
"""The smallest block of CPU attention."""
CHUNK_TOKENS = 64
"""Small, so that a hit ends where vLLM's own prefix cache hit ends (see ``prompt_of``)."""
LOOKUP_TIMEOUT_MS = 5000
"""Far above the default: tests share two cores with engines that start, and expect every hit."""
POOL_BYTES = 128 << 20
"""About 2000 chunks of the tiny model; the default would populate gigabytes of memory."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    """Prompt tokens that were not computed: vLLM's own prefix cache and Maru together."""
    finish_reason: str | None


@dataclass(frozen=True)
class EngineSettings:
    """One engine, as a newcomer would start it but for the sizes. ``maru`` None: without Maru."""

    model: Path
    runtime_dir: Path
    maru: dict[str, Any] | None = field(default_factory=dict)
    prefix_caching: bool = False
    """Off in engines with Maru, so that every cached token they report came from Maru."""
    num_blocks: int = 256
    max_batched_tokens: int = 2048
    max_model_len: int = 2048
    failure_policy: str = "recompute"

    def engine_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_batched_tokens,
            "num_gpu_blocks_override": self.num_blocks,
            "enable_prefix_caching": self.prefix_caching,
        }
        if self.maru is not None:
            args["kv_transfer_config"] = {
                "kv_connector": "MaruKVConnector",
                "kv_connector_module_path": "maru_vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": self.failure_policy,
                "kv_connector_extra_config": {
                    "maru_kv_chunk_tokens": CHUNK_TOKENS,
                    "maru_lookup_timeout_ms": LOOKUP_TIMEOUT_MS,
                    "maru_pool_size": POOL_BYTES,
                    **self.maru,
                },
            }
        return args


class Engine:
    """One engine process. Commands may be sent and awaited apart, so that several run at once."""

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        self.settings = settings
        self._log = log
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "HF_HUB_OFFLINE": "1",
            "MARU_RUNTIME_DIR": str(settings.runtime_dir),
        }
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD), json.dumps(settings.engine_args())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
        self._ready = False
        self._log_at_ready = 0

    def wait_ready(self) -> Engine:
        if not self._ready:
            self._receive()
            self._ready = True
            self._log_at_ready = len(self._log.read_text())
        return self

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            tail = "\n".join(self._log.read_text().splitlines()[-40:])
            raise RuntimeError(
                f"the engine process ended with status {status}; its log ends:\n{tail}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{reply['error']} (log: {self._log})")
        return reply.get("result")

    def send(self, op: str, **args: Any) -> None:
        self.wait_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
        self._process.stdin.flush()

    def call(self, op: str, **args: Any) -> Any:
        self.send(op, **args)
        return self._receive()

    def send_generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, salt: str | None = None
    ) -> None:
        self.send("generate", prompts=[list(p) for p in prompts], max_tokens=max_tokens, salt=salt)

    def receive_answers(self) -> list[Answer]:
        return [
            Answer(tuple(a["tokens"]), tuple(a["logprobs"]), a["cached"], a["finish_reason"])
            for a in self._receive()
        ]

    def generate(
        self, *prompts: Sequence[int], max_tokens: int = 8, salt: str | None = None
    ) -> list[Answer]:
        self.send_generate(prompts, max_tokens, salt)
        return self.receive_answers()

    def ask(self, prompt: Sequence[int], max_tokens: int = 8, salt: str | None = None) -> Answer:
        return self.generate(prompt, max_tokens=max_tokens, salt=salt)[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def log_since_ready(self) -> str:
        return self._log.read_text()[self._log_at_ready :]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def ask_to_stop(self) -> None:
        """Begin to shut down as a server would; ``close`` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        if self._process.poll() is None:
            self.ask_to_stop()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
