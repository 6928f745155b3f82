"""vLLM's executor for an engine on the CPU (``--distributed-executor-backend``), whose processes wait asleep.

vLLM's engine core and worker wait for each other by giving up the processor again and again, for a second after the
last message. Where engines have every core, the others (API servers, router, load generator) need these turns; but
from 6.18 on Linux charges a process for each turn that it gives up, two that do so on one core get far ahead of the
rest, and whatever wakes up there then waits for up to a second.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

NAP_S = 1e-4


def _nap() -> None:
    time.sleep(NAP_S)


shm_broadcast.sched_yield = _nap


class PatientExecutor(MultiprocExecutor):
    """vLLM's own in all else."""

    def _init_executor(self) -> None:
        # In place of its name: the worker, which gets a copy of the configuration, then imports this module too.
        self.parallel_config.distributed_executor_backend = type(self)
        super()._init_executor()
