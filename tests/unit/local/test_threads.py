"""Threads that give way to those of other processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from atoll.node.daemon.config import NodeConfig, validate
from atoll.node.threads import giving_way
from atoll.protocol.errors import ConfigError


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_threads_give_way_and_the_one_that_made_them_does_not() -> None:
    before = niceness()
    with giving_way(2, "test", 3) as pool:
        assert pool.submit(niceness).result() == before + 3
    assert niceness() == before


def test_threads_that_they_start_give_way_too() -> None:
    def niceness_below() -> int:
        with ThreadPoolExecutor(1) as below:
            return below.submit(niceness).result()

    with giving_way(1, "test", 3) as pool:
        assert pool.submit(niceness_below).result() == niceness() + 3


def test_threads_never_get_more_than_the_one_that_makes_them() -> None:
    """It may have no right to give more."""

    def niceness_below() -> int:
        with giving_way(1, "test", 0) as below:
            return below.submit(niceness).result()

    with giving_way(1, "test", 2) as pool:
        assert pool.submit(niceness_below).result() == niceness() + 2


def test_a_niceness_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"--nice 20: 0 .* to 19"):
        validate(NodeConfig(coordinator="127.0.0.1:1", name="a", nice=20))


def test_the_threads_of_the_node_and_of_its_ranks_are_apart() -> None:
    config = NodeConfig(coordinator="127.0.0.1:1", name="a", num_threads=1, num_node_threads=3)
    assert (config.num_rank_threads, config.num_kernel_threads) == (1, 3)
    assert replace(config, num_node_threads=0).num_kernel_threads == 1
    num_cores = len(os.sched_getaffinity(0))
    alone = replace(config, num_threads=0, num_node_threads=0, num_ranks=num_cores)
    assert (alone.num_rank_threads, alone.num_kernel_threads) == (1, num_cores)
    with pytest.raises(ConfigError, match="--node-threads -1: must be at least 1"):
        validate(replace(config, num_node_threads=-1))
