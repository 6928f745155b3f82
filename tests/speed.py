"""The speed table: what each part does in how much time on this machine, next to what it should reach.

    python tests/speed.py [--quick] [--json]

Every row has the best and the median wall time of several repeats after compilation, and the least CPU time:
on a busy machine the two differ, so the load average is printed too. `--json` prints one JSON object on
stdout; progress goes to stderr.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np

from astrolabe_lab import foresight, length, predictor, trace
from astrolabe_lab.arrivals import with_arrivals
from astrolabe_lab.cost import preset
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.request import Request
from astrolabe_lab.sim import kernel
from astrolabe_lab.sim.cluster import simulate
from astrolabe_lab.sim.engine import EngineConfig, load_requests
from astrolabe_lab.sim.queues import deliver
from astrolabe_lab.sim.state import NONE, new_state
from astrolabe_lab.sim.status import HEADER, ROW, Status, write_status

PRESET = preset("llama2-7b-a30")
ENGINE = EngineConfig.from_dict(PRESET.engine)
INSTANCES = 12
MILLION = "million iterations/s"
PAPER_LENGTHS = "data/astrolabe/trace_data__sharegpt__sharegpt_val_10k_llama2.csv.gz"
TIMINGS = "data/vidur/llmservingsim/RTXPRO6000_Llama-3.1-8B_bf16_tp1"
MEASURED = "data/vidur/llmservingsim/measured_vllm/RTXPRO6000_Llama-3.1-8B"


@dataclass
class Row:
    """One line, in `unit`: best and median of the repeats by wall time, and the best by CPU time.

    `reach` is the figure to reach, as ">= 4" or "<= 0.3".
    """

    what: str
    best: float
    median: float
    cpu: float
    unit: str
    reach: str = ""
    note: str = ""

    @property
    def met(self):
        """Whether the best repeat reaches the figure; None where there is none or nothing was measured."""
        if not self.reach or not np.isfinite(self.best):
            return None
        sign, figure = self.reach.split()
        return bool(self.best >= float(figure) if sign == ">=" else self.best <= float(figure))


def shared():
    """The folder of real data; it need not exist."""
    return Path(os.environ.get("ASTROLABE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def paper_lengths():
    """The requests to replay (a trace frame without times) and a line on where they come from."""
    if (shared() / PAPER_LENGTHS).exists():
        return trace.load(shared() / PAPER_LENGTHS), "the paper's 10,000 ShareGPT lengths"
    generated = sharegpt_like.generate(10_000, seed=0, text=False)
    return generated, "generated ShareGPT-like lengths (the paper's are not here)"


def timed(run, repeats, cpu=time.process_time, prepare=lambda: None):
    """(best wall, median wall, best CPU) seconds of `repeats` calls of run(), after one that compiles; prepare(), not
    timed, comes before each."""
    prepare()
    run()
    wall_s, cpu_s = [], []
    for _ in range(repeats):
        prepare()
        began, began_cpu = time.perf_counter(), cpu()
        run()
        cpu_s.append(cpu() - began_cpu)
        wall_s.append(time.perf_counter() - began)
    return min(wall_s), statistics.median(wall_s), min(cpu_s)


class Stopwatch:
    """While entered, times every call of a module's function: (wall, CPU) seconds each in `calls`."""

    def __init__(self, module, name):
        self.module, self.name, self.function, self.calls = module, name, getattr(module, name), []

    def __enter__(self):
        setattr(self.module, self.name, self.call)
        return self

    def __exit__(self, *error):
        setattr(self.module, self.name, self.function)

    def call(self, *args):
        began, began_cpu = time.perf_counter(), time.process_time()
        answer = self.function(*args)
        used_cpu = time.process_time() - began_cpu
        self.calls.append((time.perf_counter() - began, used_cpu))
        return answer

    def of(self, first, count):
        """(best wall, median wall, best CPU) seconds of `count` calls from the first-th on, as `timed` gives them."""
        wall_s, cpu_s = zip(*self.calls[first : first + count], strict=True)
        return min(wall_s), statistics.median(wall_s), min(cpu_s)


def children_cpu():
    """CPU seconds of the subprocesses that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def loaded(frame, instances=1):
    """The state of idle engines and the frame's requests, with their true lengths as predictions."""
    state = new_state([ENGINE] * instances, [PRESET.cost] * instances, len(frame))
    output = frame["output_tokens"].to_numpy()
    load_requests(state, frame["prompt_tokens"].to_numpy(), output, output)
    return state


# --- rows ---------------------------------------------------------------------------------------------------


def one_engine(requests, repeats, qps=2.33):
    """Iterations a second of one engine, stepping and leaping, and of vLLM's own scheduler."""
    frame = with_arrivals(requests, qps, seed=0)
    finished, rows = [], []
    repeats *= 6  # a run takes some 20 ms: short enough to fall between what else the machine does
    for name, leaps, reach in (("single-stepping", False, ">= 4"), ("leaping", True, ">= 8")):
        waiting = loaded(frame)
        for r, ready_s in enumerate(frame["arrived_s"].to_numpy()):
            deliver(*waiting, 0, r, ready_s)
        state = type(waiting)(*(copy(array) for array in waiting))

        def start_again(state=state, waiting=waiting):
            for array, at_start in zip(state, waiting, strict=True):
                if array is not None:
                    array[...] = at_start

        times = timed(lambda state=state, leaps=leaps: run_to_end(state, leaps), repeats, prepare=start_again)
        steps, tokens = (int(state.engines[count][0]) for count in ("steps", "tokens"))
        finished.append(state.requests["finished_s"])
        rates = [steps / seconds / 1e6 for seconds in times]
        note = f"{steps:,} iterations of {tokens / steps:.0f} tokens on average"
        rows.append(Row(f"one engine, {qps} QPS, {name}", *rates, MILLION, reach, note))
    apart_s = np.nanmax(np.abs(finished[0] - finished[1]))
    rows[1].note = f"{rows[1].best / rows[0].best:.1f} x single-stepping, finish times within {apart_s:.1g} s"
    return [*rows, vllm_scheduler(frame, repeats, rows)]


def run_to_end(state, leaps):
    kernel.advance(*state, 0, np.inf, NONE, leaps)


def vllm_scheduler(frame, repeats, rows, steps=3000):
    """The rate of vLLM's own scheduler over its first steps, counting its own two calls only."""
    what = "vLLM's own scheduler, the same requests"
    if importlib.util.find_spec("vllm") is None:
        return Row(what, np.nan, np.nan, np.nan, MILLION, note="vLLM is not installed: make vllm adds it")
    from astrolabe_lab.oracle import can_never_run, steps_per_second

    frame = frame[~can_never_run(frame, ENGINE)].head(1000)
    rates = [steps_per_second(frame, ENGINE, PRESET.cost, steps) / 1e6 for _ in range(3)]
    ratios = " and ".join(f"{row.best / max(rates):,.0f}" for row in rows)
    note = f"its first {steps:,} steps; ours are {ratios} times as fast"
    return Row(what, max(rates), statistics.median(rates), np.nan, MILLION, note=note)


def cluster(requests, repeats):
    """Whole runs of 12 engines at 28 QPS."""
    frame = length.attach(with_arrivals(requests, 28.0, seed=0), "oracle")
    rows = []
    for what, policy, compiled, reach in (
        ("least_loaded, compiled twin", "least_loaded", True, "<= 0.06"),
        ("least_loaded, Python object", "least_loaded", False, "<= 0.3"),
        ("astrolabe k=2, compiled twin", "astrolabe:k=2", True, "<= 2.0"),
        ("astrolabe k=2, Python object", "astrolabe:k=2", False, ""),
    ):
        outcome = {}

        def run(policy=policy, compiled=compiled, outcome=outcome):
            outcome["frame"] = simulate(
                frame, policy, instances=INSTANCES, engine=ENGINE, cost=PRESET.cost, compiled=compiled
            )

        times = timed(run, repeats)
        ok = outcome["frame"]
        note = f"P99 TTFT {ok['ttft_s'].quantile(0.99):.1f} s, {ok['preemptions'].sum():,} preemptions"
        what = f"{INSTANCES} engines, {len(frame):,} requests, 28 QPS: {what}"
        rows.append(Row(what, *times, "s", reach, note))
    return rows


def snapshots_of(frame, count):
    """`count` statuses that requests meet at one of 12 least-loaded engines, with these requests."""
    state = loaded(frame, INSTANCES)
    rng = np.random.default_rng(0)
    every = max(1, len(frame) // count)
    header, rows, met = np.zeros(1, HEADER), np.zeros(len(frame), ROW), []
    columns = (frame[c].tolist() for c in ("arrived_s", "prompt_tokens", "output_tokens"))
    for r, (arrived_s, prompt, output) in enumerate(zip(*columns, strict=True)):
        kernel.advance_all(*state, arrived_s, True)
        if r % every == every - 1:
            write_status(*state, int(rng.integers(INSTANCES)), arrived_s, header, rows)
            status = Status(header.copy(), rows[: int(header["n_rows"][0])].copy())
            met.append((status, Request(r, arrived_s, prompt, output)))
        engines = state.engines
        deliver(*state, int(np.argmin(engines["n_running"] + engines["n_waiting"])), r, arrived_s)
    return met


def predictions(requests, repeats, snapshots):
    """One prediction at statuses of a busy cluster, in the kernel and from Python; medians over statuses."""
    rows = []
    for qps, reach in ((28, "<= 60"), (34, "<= 250")):
        frame = with_arrivals(requests, qps, seed=0)
        statuses = snapshots_of(frame, snapshots)
        asked = predictor.Predictor(ENGINE, PRESET.cost)
        from_python = [timed(partial(asked.predict, *met), repeats) for met in statuses]
        in_kernel = kernel_times([(asked, *met) for met in statuses], repeats)
        requests_in = int(np.median([len(status.rows) for status, _ in statuses]))
        p99 = 1e6 * np.quantile([best for best, _, _ in in_kernel], 0.99)
        note = f"{len(statuses)} statuses, median {requests_in} requests in one; p99 {p99:.0f} us"
        what = f"one prediction, {qps} QPS state"
        rows.append(Row(f"{what}, kernel", *1e6 * np.median(in_kernel, axis=0), "us", reach, note))
        rows.append(Row(f"{what}, Predictor.predict", *1e6 * np.median(from_python, axis=0), "us"))
        for kind, name in (("learned", "a learned correction"), ("arrivals", "assumed arrivals")):
            seeing = [(having_seen(frame, kind, request), status, request) for status, request in statuses]
            times = np.median(kernel_times(seeing, repeats), axis=0)
            rows.append(Row(f"{what}, kernel, with {name}", *1e6 * times, "us"))
    return rows


def kernel_times(asked, repeats):
    """(best, median, best CPU) seconds in the kernel of each (Predictor, status, request)."""
    with Stopwatch(predictor, "predict") as kernel_time:
        for predicting, *met in asked:
            for _ in range(repeats):
                predicting.predict(*met)
    return [kernel_time.of(k * repeats, repeats) for k in range(len(asked))]


def having_seen(frame, kind, request):
    """A Predictor whose foresight knows the dispatches before the request."""
    seen = foresight.Foresight(kind, INSTANCES)
    before = frame[frame["arrived_s"] < request.arrived_s].tail(foresight.WINDOW)
    for row in zip(*(before[c].tolist() for c in ("arrived_s", "prompt_tokens", "output_tokens")), strict=True):
        seen.observe_dispatch(*row)
    return predictor.Predictor(ENGINE, PRESET.cost, foresight=seen)


PREDICTOR_PROCESS = """
import psutil
from astrolabe_lab.cost import preset
from astrolabe_lab.request import Request
from astrolabe_lab.predictor import Predictor, empty_status
from astrolabe_lab.request import Request
from astrolabe_lab.sim.config import EngineConfig
p = preset("llama2-7b-a30")
engine = EngineConfig.from_dict(p.engine)
assert Predictor(engine, p.cost).predict(empty_status(0.0, engine), Request(0, 0.0, 246, 326)).fits
print(psutil.Process().memory_info().rss / 1e6)
"""


def predictor_memory(repeats):
    """Resident memory of a process that holds one Predictor and has predicted."""
    command = [sys.executable, "-c", PREDICTOR_PROCESS]
    sizes = [float(output_of(command)) for _ in range(1 + min(repeats, 3))][1:]
    what = "a Predictor process, resident memory"
    return Row(what, min(sizes), statistics.median(sizes), np.nan, "MB", "<= 300")


def second_start(requests, repeats):
    """`astrolabe simulate` from the shell, with every kernel in the disk cache."""
    with tempfile.TemporaryDirectory() as folder:
        trace.save(requests[["rid", "prompt_tokens", "output_tokens"]], Path(folder) / "trace.csv")
        options = f"--trace {folder}/trace.csv --qps 28 --policy least_loaded --instances {INSTANCES}"
        command = [sys.executable, "-m", "astrolabe_lab.cli", "simulate", *options.split()]
        command += ["--out", f"{folder}/out.parquet"]
        began = time.perf_counter()
        output_of(command)
        first_s = time.perf_counter() - began
        times = timed(partial(output_of, command), min(repeats, 3), children_cpu)
    note = f"{len(requests):,} requests read, replayed and written; the first start here took {first_s:.1f} s"
    return Row("second start of astrolabe simulate", *times, "s", "<= 2.5", note)


def traces(requests, repeats):
    """Reading a trace file of 10,000 rows, and drawing as many requests."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = trace.save(with_arrivals(requests, 28, seed=0), Path(folder) / "trace.csv")
        rows.append(
            Row(f"reading a CSV trace of {len(requests):,}", *timed(partial(trace.load, path), repeats), "s", "<= 0.5")
        )
    for text, what, reach in ((True, "with text", "<= 3"), (False, "without text", "<= 0.5")):
        times = timed(partial(sharegpt_like.generate, 10_000, seed=9, text=text), min(repeats, 3))
        rows.append(Row(f"drawing 10,000 ShareGPT-like requests, {what}", *times, "s", reach))
    return rows


def published_status(repeats, prompt=100, steps=150):
    """What publishing adds to vLLM's own scheduler on each step of a full engine, in % of what the model takes."""
    n = ENGINE.max_num_seqs
    what = f"publishing the status of {n} requests at each step"
    if importlib.util.find_spec("vllm") is None:
        return Row(what, np.nan, np.nan, np.nan, "% of the step", note="vLLM is not installed: make vllm adds it")
    added = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            pair = stock_and_publishing(Path(folder))
            stock_s, publishing_s = (decode_step_s(each, n, prompt, steps) for each in pair)
            added.append(publishing_s - stock_s)
    modelled_s = PRESET.cost.step_seconds(n, n, n * (prompt + steps / 2))
    share = 100 * np.array(added) / modelled_s
    note = f"{1e6 * statistics.median(added):.0f} us at the median; the step is modelled as {1e3 * modelled_s:.1f} ms"
    return Row(what, float(share.min()), float(np.median(share)), np.nan, "% of the step", "<= 1", note)


def stock_and_publishing(folder):
    """vLLM's scheduler of ENGINE, and ours over it, which publishes into ``folder``."""
    from vllm.v1.structured_output import StructuredOutputManager

    from astrolabe_lab.engines.emulation import KEY
    from astrolabe_lab.status.scheduler import StatusScheduler
    from astrolabe_lab.vllm_scheduler import scheduler

    stock, vllm_config = scheduler(ENGINE), scheduler(ENGINE).vllm_config
    vllm_config.additional_config = {KEY: {"status": str(folder / "status"), "steps": str(folder / "steps")}}
    manager = StructuredOutputManager(vllm_config)
    return stock, StatusScheduler(vllm_config, stock.kv_cache_config, manager, block_size=ENGINE.block_size)


def decode_step_s(scheduler, n, prompt, steps):
    """Median seconds that a scheduler takes for each of ``steps`` in which ``n`` requests decode."""
    from vllm.v1.outputs import ModelRunnerOutput

    from astrolabe_lab.vllm_scheduler import request

    sizes = SimpleNamespace(prompt_tokens=prompt, output_tokens=2 * steps, arrived_s=0.0)
    for rid in range(n):
        scheduler.add_request(request(SimpleNamespace(rid=rid, **vars(sizes)), 1, None))
    seconds = []
    while len(seconds) < steps:
        began = time.perf_counter()
        planned = scheduler.schedule()
        used_s = time.perf_counter() - began
        rids = list(planned.num_scheduled_tokens)
        tokens = [[] if scheduler.requests[rid].is_prefill_chunk else [1] for rid in rids]
        answer = ModelRunnerOutput(rids, {rid: j for j, rid in enumerate(rids)}, tokens)
        began = time.perf_counter()
        scheduler.update_from_output(planned, answer)
        if planned.total_num_scheduled_tokens == n == len(rids):
            seconds.append(used_s + time.perf_counter() - began)
    return statistics.median(seconds)


def replay_of_a_measured_run(repeats):
    """The simulation within `fidelity.compare`, on the measured GPU run; nothing where that is not at hand."""
    from astrolabe_lab import fidelity
    from astrolabe_lab.fidelity.layers import LayerTimings
    from astrolabe_lab.fidelity.measured_run import MeasuredRun

    if not (shared() / MEASURED).is_dir():
        return []
    sides = LayerTimings.load(shared() / TIMINGS), MeasuredRun.load(shared() / MEASURED)
    wall_s = [fidelity.compare(*sides).wall_s for _ in range(1 + min(repeats, 3))][1:]
    what = "a measured run of 300 requests replayed"
    return [Row(what, min(wall_s), statistics.median(wall_s), np.nan, "s", "<= 1")]


def output_of(command):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"speed: {' '.join(command[1:4])} failed ({done.returncode}):\n{done.stderr.strip()}")
    return done.stdout


# --- table --------------------------------------------------------------------------------------------------


def machine():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "processor": processor(),
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def show(rows, before, after, source):
    loads = f"{before['load_average_1min']} before, {after['load_average_1min']} after"
    print(source)
    print(f"{before['processor']}, {before['cores']} cores, load average {loads}; ", end="")
    print(f"Python {before['python']}, numba {before['numba']}")
    if max(before["load_average_1min"], after["load_average_1min"]) > before["cores"]:
        print("The machine was busy: wall times are worse than it can do, and 'missed' says little.")
    width = max(len(row.what) for row in rows)
    print(f"\n{'':{width}} {'best':>9} {'median':>9} {'by CPU':>9}  {'unit':20} {'reach':>7}")
    for row in rows:
        verdict = {True: "reached", False: "missed", None: ""}[row.met]
        cells = (f"{x:9.4g}" if np.isfinite(x) else f"{'':9}" for x in (row.best, row.median, row.cpu))
        print(f"{row.what:{width}} {' '.join(cells)}  {row.unit:20} {row.reach:>7}  {verdict}".rstrip())
        if row.note:
            print(f"    {row.note}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and statuses (half a minute)")
    args = parser.parse_args()
    repeats, snapshots = (3, 50) if args.quick else (9, 400)
    requests, source = paper_lengths()
    before, rows = machine(), []
    for name, measured in (
        ("one engine", lambda: one_engine(requests, repeats)),
        ("clusters", lambda: cluster(requests, repeats)),
        ("predictions", lambda: predictions(requests, repeats, snapshots)),
        ("memory", lambda: [predictor_memory(repeats)]),
        ("traces", lambda: traces(requests, repeats)),
        ("status", lambda: [published_status(min(repeats, 5))]),
        ("fidelity", lambda: replay_of_a_measured_run(repeats)),
        ("start", lambda: [second_start(requests, repeats)]),
    ):
        print(f"speed: {name} ...", file=sys.stderr, flush=True)
        rows += measured()
    after = machine()
    if args.json:
        table = [asdict(row) | {"met": row.met} for row in rows]
        table = [{k: None if v != v else v for k, v in row.items()} for row in table]
        load = after["load_average_1min"]
        print(json.dumps({"machine": before, "load_average_after": load, "lengths": source, "rows": table}))
    else:
        show(rows, before, after, f"{source}; preset {PRESET.name}")


if __name__ == "__main__":
    main()
