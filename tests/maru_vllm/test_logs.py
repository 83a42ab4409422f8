from __future__ import annotations

import logging

import pytest

from maru_vllm import logs


def bare_loggers(monkeypatch: pytest.MonkeyPatch) -> dict[str, logging.Logger]:
    """The loggers concerned without handlers, until the test ends. Called by the test itself, for
    pytest gives the root logger a handler just before."""
    names = ("", "vllm", "maru_vllm", "maru_shm", "maru_kv_ops")
    found = {name: logging.getLogger(name) for name in names}
    for logger in found.values():
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "level", logger.level)
    return found


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_our_lines_appear_once_among_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = bare_loggers(monkeypatch)
    engine = Lines()
    loggers["vllm"].addHandler(engine)
    loggers["vllm"].setLevel(logging.INFO)
    logs.follow_vllm()
    logs.follow_vllm()
    logging.getLogger("maru_vllm.worker.half").info("hello")
    logging.getLogger("maru_vllm.worker.half").debug("too much")
    assert engine.lines == ["hello"]


def test_a_program_that_configured_logging_itself_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loggers = bare_loggers(monkeypatch)
    root = Lines()
    loggers[""].addHandler(root)
    loggers["vllm"].addHandler(Lines())
    logs.follow_vllm()
    assert not loggers["maru_vllm"].handlers
    logging.getLogger("maru_vllm").warning("hello")
    assert root.lines == ["hello"]
