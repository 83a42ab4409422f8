from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma

import maru_vllm
from maru_vllm.connector import MaruKVConnector
from maru_vllm.metadata import MaruConnectorMetadata, MaruWorkerMetadata
from maru_vllm.scheduler.half import SchedulerHalf
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.jobs import Reports

SCHEDULER_HALF = Mock(spec=SchedulerHalf)
WORKER_HALF = Mock(spec=WorkerHalf)


class Delegating(MaruKVConnector):
    """The facade over halves that only note what is asked of them."""

    def _make_scheduler_half(self, *_: Any) -> SchedulerHalf:
        return SCHEDULER_HALF

    def _make_worker_half(self, *_: Any) -> WorkerHalf:
        return WORKER_HALF


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    SCHEDULER_HALF.reset_mock(return_value=True)
    WORKER_HALF.reset_mock(return_value=True)


def connector(role: KVConnectorRole) -> Delegating:
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))
    return Delegating(config, role, kv_cache_config=SimpleNamespace())  # type: ignore[arg-type]


def test_vllm_finds_the_connector_by_the_package_and_its_name() -> None:
    transfer: Any = SimpleNamespace(
        kv_connector="MaruKVConnector", kv_connector_module_path="maru_vllm"
    )
    assert KVConnectorFactory.get_connector_class(transfer) is MaruKVConnector
    assert supports_hma(MaruKVConnector)


def test_a_best_effort_cache_never_asks_for_delivery() -> None:
    assert not connector(KVConnectorRole.SCHEDULER).requires_kv_delivery


@pytest.mark.parametrize(
    ("extra", "piecewise"),
    [
        ({}, False),
        ({"maru_overlap_load_with_compute": True}, True),
        ({"maru_overlap_load_with_compute": True, "maru_async_load": False}, True),
        ({"maru_async_load": False}, False),
    ],
)
def test_b20_piecewise_graphs_are_asked_for_exactly_where_the_layer_hooks_do_work(
    extra: dict[str, Any], piecewise: bool
) -> None:
    assert MaruKVConnector.requires_piecewise_for_cudagraph(extra) is piecewise


def test_each_role_has_its_half_and_no_other() -> None:
    scheduler = connector(KVConnectorRole.SCHEDULER)
    worker = connector(KVConnectorRole.WORKER)
    with pytest.raises(RuntimeError, match="worker-side"):
        scheduler.wait_for_save()
    with pytest.raises(RuntimeError, match="scheduler-side"):
        worker.has_pending_push_work()
    scheduler.shutdown()
    worker.shutdown()
    SCHEDULER_HALF.shutdown.assert_called_once_with()
    WORKER_HALF.shutdown.assert_called_once_with()


def test_the_steps_metadata_reaches_the_worker_half_and_preemptions_come_before_it() -> None:
    worker = connector(KVConnectorRole.WORKER)
    metadata = MaruConnectorMetadata(hold_requests=frozenset({"r"}))
    worker.handle_preemptions(metadata)
    WORKER_HALF.handle_preemptions.assert_called_once_with(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(SimpleNamespace(), scheduler_output=None)  # type: ignore[arg-type]
    worker.wait_for_save()
    WORKER_HALF.start_load_kv.assert_called_once_with(metadata)
    WORKER_HALF.wait_for_save.assert_called_once_with(metadata)


def test_hooks_without_bound_metadata_have_nothing_to_do() -> None:
    worker = connector(KVConnectorRole.WORKER)
    worker.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
    (given,) = WORKER_HALF.start_load_kv.call_args.args
    assert given == MaruConnectorMetadata()


def test_transfer_results_are_vllms_sets() -> None:
    WORKER_HALF.transfer_results.return_value = Reports(
        loads=(),
        stores=(),
        finished_sending=frozenset({"s"}),
        finished_recving=frozenset({"a", "b"}),
        failed_recving=frozenset({"b"}),
    )
    results = connector(KVConnectorRole.WORKER).get_transfer_results(set())
    assert results.finished_sending == {"s"}
    assert results.finished_recving == {"a", "b"}
    assert results.failed_recving == {"b"}
    # Callers merge into these sets (MultiConnector does).
    results.finished_sending.add("t")


def test_what_the_worker_half_has_to_say_is_handed_on() -> None:
    WORKER_HALF.worker_meta.return_value = MaruWorkerMetadata(populated_bytes=7)
    worker = connector(KVConnectorRole.WORKER)
    assert worker.build_connector_worker_meta() == MaruWorkerMetadata(populated_bytes=7)
    assert worker.get_kv_connector_stats() is None


def test_request_ends_of_all_groups_are_those_of_the_only_group() -> None:
    SCHEDULER_HALF.finished.return_value = True
    scheduler = connector(KVConnectorRole.SCHEDULER)
    request: Any = object()
    assert scheduler.request_finished_all_groups(request, ([1, 2],)) == (True, None)
    assert scheduler.request_finished(request, [1, 2]) == (True, None)
    assert [call.args for call in SCHEDULER_HALF.finished.call_args_list] == [
        (request, [1, 2]),
        (request, [1, 2]),
    ]


def test_block_ids_are_read_from_vllms_manager_when_they_are_asked_for() -> None:
    scheduler = connector(KVConnectorRole.SCHEDULER)
    manager = Mock()
    manager.get_block_ids.return_value = ([4, 5],)
    scheduler.bind_kv_cache_manager(manager)
    block_table, evict_blocks = SCHEDULER_HALF.bind_block_table.call_args.args
    assert evict_blocks is manager.evict_blocks
    manager.get_block_ids.assert_not_called()
    assert block_table("r") == [4, 5]


def test_an_unknown_name_in_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = maru_vllm.NoSuchThing


def test_without_vllm_the_package_imports_and_only_the_connector_says_what_is_missing() -> None:
    program = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "import maru_vllm\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    maru_vllm.MaruKVConnector\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "MaruKVConnector needs vLLM" in done.stdout
