"""One small Ray cluster for all tests of this folder that need one."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

NODE = {"num_cpus": 2, "object_store_memory": 200_000_000}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with real processes are no part of the quick suite."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    # The processes of the cluster import the helpers of the tests, compute in one thread, and have normal priority.
    paths = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    given = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    # A dead node is found within seconds.
    given |= {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "1000"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own deprecations
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray leaves files to the garbage collector
        del cluster
        gc.collect()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="package")
def elsewhere(cluster: Any) -> Iterator[Any]:
    """Calls functions in another process of the cluster: ``elsewhere(function, *args)`` returns a reference."""
    import ray

    class Process:
        def call(self, function: Any, *args: Any) -> Any:
            return function(*args)

    actor = ray.remote(num_cpus=0.1)(Process).remote()
    yield lambda function, *args: actor.call.remote(function, *args)
    ray.kill(actor)
