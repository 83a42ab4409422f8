"""A real vLLM engine in a process of its own, driven by one JSON object per line.

Run by ``e2e_engine.Engine``; never imported by a test. The engine core lives in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so it starts in seconds and every step is the script's.
Requests come in on stdin, replies go out on the descriptor that stdout had at start; whatever
vLLM prints goes to stderr, which is the test's log file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

from vllm import LLM, SamplingParams

DRAIN_TIMEOUT_S = 60.0


class Child:
    def __init__(self, engine_args: dict[str, Any]) -> None:
        self._llm = LLM(**engine_args)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._outputs: dict[str, Any] = {}
        self._preemptions = 0
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting

    def generate(self, prompts: list[list[int]], max_tokens: int, salt: str | None) -> Any:
        """Run all prompts together until they finish, then until the connector is idle."""
        ids = [f"r{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, max_tokens, salt)
        while self._engine.has_unfinished_requests():
            self.step(1)
        self.drain()
        return [self._outputs.pop(request_id) for request_id in ids]

    def add(self, request_id: str, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        tokens: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            tokens["cache_salt"] = salt
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=1, detokenize=False, ignore_eos=True
        )
        self._engine.add_request(request_id, tokens, params)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self._engine.step():
                completion = output.outputs[0]
                logprobs = [
                    entry[token].logprob
                    for entry, token in zip(
                        completion.logprobs or [], completion.token_ids, strict=False
                    )
                ]
                self._outputs[output.request_id] = {
                    "tokens": list(completion.token_ids),
                    "logprobs": logprobs,
                    "cached": output.num_cached_tokens or 0,
                    "finish_reason": completion.finish_reason,
                }

    def shortfalls(self, prompt: list[int], answer: list[int]) -> list[float]:
        """For each token of the answer, how much less likely than the likeliest it was, in nats,
        given everything before it, computed in one prefill."""
        request_id = f"s{time.monotonic_ns()}"
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt + answer}, params)
        positions: Any = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                positions = output.prompt_logprobs
        return [
            max(candidate.logprob for candidate in position.values()) - position[token].logprob
            for token, position in zip(answer, positions[len(prompt) :], strict=True)
        ]

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])
        self._outputs.pop(request_id, None)

    def status(self, request_id: str) -> str:
        """vLLM appends to the name that a request was added under."""
        for name, request in self._core.scheduler.requests.items():
            if name.startswith(request_id):
                return str(request.status.name)
        return "gone"

    def step_until(self, request_id: str, status: str) -> None:
        give_up = time.monotonic() + DRAIN_TIMEOUT_S
        while self.status(request_id) != status:
            self.step(1)
            if time.monotonic() > give_up:
                raise TimeoutError(f"{request_id} is {self.status(request_id)}, never {status}")

    def drain(self) -> None:
        """What the core's busy loop does in a server: step on while the scheduler wants to."""
        give_up = time.monotonic() + DRAIN_TIMEOUT_S
        while self._core.scheduler.has_requests():
            self.step(1)
            if time.monotonic() > give_up:
                raise TimeoutError("the engine still has work after everything finished")

    def reset_prefix_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def free_blocks(self) -> int:
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def preemptions(self) -> int:
        return self._preemptions

    def stop_stores_halfway(self, seconds: float) -> None:
        """From now on every store copies half of its bytes, and waits: long enough to be killed."""
        from maru_kv_ops.executors import CopyMemory, CopyPath
        from maru_kv_ops.host_executor import HostExecutor
        from maru_kv_ops.plan import CopyPlan, TransferDirection
        from maru_kv_ops.torch_executor import TorchExecutor

        def stop_halfway(executor_class: Any) -> None:
            run = executor_class.run

            def halfway(executor: Any, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
                if plan.direction is TransferDirection.D2H:
                    half = replace(plan, copies=plan.copies[: len(plan.copies) // 2])
                    run(executor, half, memory)
                    time.sleep(seconds)
                path: CopyPath = run(executor, plan, memory)
                return path

            executor_class.run = halfway

        for executor_class in (HostExecutor, TorchExecutor):  # whichever serves this engine
            stop_halfway(executor_class)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            result = getattr(child, call["op"])(**call["args"])
            print(json.dumps({"result": result}), file=replies)
        except Exception as error:  # reported to the test, which fails with it
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)


if __name__ == "__main__":
    main()
