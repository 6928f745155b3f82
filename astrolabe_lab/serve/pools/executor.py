"""The emulated engine of a pool: steps take their modelled time, and so do the transfers between them."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

from astrolabe_lab.calibrate.artifact import Transfer
from astrolabe_lab.engines.emulate import EmulatedExecutor, _done
from astrolabe_lab.serve.pools.connector import DESK, Pull
from astrolabe_lab.serve.pools.desk import Caller
from astrolabe_lab.serve.pools.link import Link

LOG = "transfers.jsonl"  # in the engine's folder: one line a pull that ended, and one for blocks that expired


class PoolExecutor(EmulatedExecutor):
    """As ``EmulatedExecutor``; in place of workers it carries blocks over a ``Link`` and says when they are there."""

    def _init_executor(self) -> None:
        super()._init_executor()
        transfer = self.vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        self._scale = float(extra["time_scale"])
        self._link = Link(Transfer(float(extra["latency_s"]), float(extra["per_block_s"])))
        self._caller = Caller()
        self._mutex = (
            threading.Lock()
        )  # steps end in the device's thread, under asynchronous scheduling beside the next
        self._under_way: dict[str, tuple[Pull, float]] = {}
        self._fail_share, self._dice = float(extra["fail_share"]), random.Random(self.emulation.seed)
        self._log = Path(self.emulation.control).with_name(LOG) if self.emulation.control else None
        self._keeps = transfer.is_kv_producer
        if self._keeps:
            DESK.open(int(extra["port"]))

    def execute_model(self, scheduler_output, non_block: bool = False):
        self._begin(scheduler_output.kv_connector_metadata)
        answer = super().execute_model(scheduler_output, non_block)
        if scheduler_output.total_num_scheduled_tokens > 0:
            return answer
        output = self._with_transfers(EMPTY_MODEL_RUNNER_OUTPUT)
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output, non_block: bool = False):
        future = super().sample_tokens(grammar_output, non_block=True)
        whole: Future = Future()
        future.add_done_callback(lambda done: whole.set_result(self._with_transfers(done.result())))
        return whole if non_block else whole.result()

    def shutdown(self) -> None:
        self._caller.close()
        super().shutdown()

    def _now_s(self) -> float:
        return time.monotonic() / self._scale

    def _begin(self, told) -> None:
        for pull in told.pulls if told else ():
            with self._mutex:
                self._under_way[pull.rid] = (pull, self._now_s())
            self._caller.ask(pull.port, pull.name, pull.rid)
        for port, name in told.dropped if told else ():
            self._caller.done(port, name)

    def _with_transfers(self, output):
        """The output with what has arrived here, failed, or been let go since the last one."""
        with self._mutex:
            return self._told(output)

    def _told(self, output):
        now_s, failed = self._now_s(), set()
        for rid, kept in self._caller.answers():
            if kept:
                self._link.start(rid, self._under_way[rid][0].blocks, self._under_way[rid][1])
            else:
                failed.add(rid)
        arrived = set(self._link.poll(now_s))
        unlucky = {rid for rid in arrived if self._dice.random() < self._fail_share}
        for rid in arrived | failed:
            pull, begun_s = self._under_way.pop(rid)
            ok = rid in arrived - unlucky
            if ok:
                self._caller.done(pull.port, pull.name)
            self._note(blocks=pull.blocks, seconds=now_s - begun_s, ok=ok, gone=rid in failed)
        gone = DESK.gone() if self._keeps else []
        for name, pulled in gone:
            if not pulled:
                self._note(expired=name)
        if not (arrived or failed or gone):
            return output
        output = copy.copy(output)
        output.kv_connector_output = KVConnectorOutput(
            finished_sending={name for name, _ in gone} or None,
            finished_recving=(arrived | failed) or None,
            failed_recving=failed | unlucky,
        )
        return output

    def _note(self, **entry) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
