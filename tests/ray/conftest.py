"""A small Ray cluster for the tests of a file: nodes are added where a test needs them."""

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    # What the processes of the cluster are started with: they import the helpers of the tests, compute in one thread,
    # and are not put behind everything else that this machine does.
    given = {"PYTHONPATH": HERE, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    # A node that is gone is found within seconds.
    given |= {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "1000"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray speaks of its own future while it connects
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray leaves files to the collector
        del cluster
        gc.collect()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
