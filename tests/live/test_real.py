"""Two real engines with a small model on cores of their own, behind the router: the hardware world, on any machine."""

import asyncio
import json
import time
import urllib.error
import urllib.request

import numpy as np
import pandas as pd
import psutil
import pytest
from marks import by_the_clock, measures_time

from astrolabe_lab import bench, cli
from astrolabe_lab.engines import engine_cost
from astrolabe_lab.engines.cluster_file import read_cluster
from astrolabe_lab.engines.launch import launch
from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import data, evaluate
from astrolabe_lab.length.kinds import make
from astrolabe_lab.measure import summarise
from astrolabe_lab.serve import journal
from astrolabe_lab.serve.routing import routing
from astrolabe_lab.status.published import StatusReader

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENGINE = "max_num_seqs=16,max_num_batched_tokens=256,block_size=32,num_gpu_blocks=512,max_model_len=2048"
said = []


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two engines with a random Llama; one that ends is started again."""
    folder = tmp_path_factory.mktemp("real") / "c"
    with launch(
        2, world="hardware", engine=ENGINE, folder=folder, restart=True, timeout_s=900, progress=said.append
    ) as cluster:
        yield cluster


def ask(url, **body):
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def trace_of(n, qps, seed=0, longest=60):
    frame = sharegpt_like.generate(n, seed=seed, text=False)
    rng = np.random.default_rng(seed)
    return frame.assign(
        arrived_s=np.cumsum(rng.exponential(1 / qps, n)),
        prompt_tokens=frame["prompt_tokens"].clip(upper=400),
        output_tokens=frame["output_tokens"].clip(upper=longest),
        predicted_tokens=frame["output_tokens"].clip(upper=longest),
    )


def test_engines_run_with_the_flags_they_were_told_and_tell_those_that_vllm_chose(real):
    config = real.config
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (16, 256, 32)
    assert (config.num_gpu_blocks, config.max_model_len) == (512, 2048)
    assert config.enable_prefix_caching and config.enable_chunked_prefill and not config.async_scheduling
    assert read_cluster(real.folder).config == config and read_cluster(real.folder).world == "hardware"
    assert said[-1].startswith("engines: 2 of 2 serve")


def test_every_engine_computes_on_its_own_cores(real):
    own = [engine.place.cores for engine in real.engines]
    for engine in real.engines:
        bound = [tuple(psutil.Process(pid).cpu_affinity()) for pid in engine.pids()]
        assert engine.place.cores == () or engine.place.cores in bound
    assert len(set(own)) == len(own) or own == [(), ()]


def test_an_engine_that_has_just_answered_leaves_the_processor_to_others(real):
    """vLLM's own processes would spin for a second more, all of them."""
    used_s = []
    for _ in range(3):
        ask(real.urls[0], model=real.model, prompt=[7, 8, 9], max_tokens=4, ignore_eos=True)
        before = _cpu_s(real.engines[0])
        time.sleep(0.6)
        used_s.append(_cpu_s(real.engines[0]) - before)
    assert min(used_s) < 0.3, used_s


def _cpu_s(engine):
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in engine.pids())


def test_the_gates_hold_on_real_engines_and_leave_their_caches_empty(real):
    verdicts = asyncio.run(bench.check(real.urls, real.model))
    assert all(one.ok for one in verdicts), [str(one) for one in verdicts]
    (reset,) = [one for one in verdicts if one.gate == "prefix_reset"]
    assert "96 were found before the reset, 0 after" in reset.detail


def test_a_trace_through_the_router_gets_exact_answers_from_both_engines(real, tmp_path, capsys):
    trace, out = trace_of(24, qps=6.0), tmp_path / "r.parquet"
    trace.drop(columns=["predicted_tokens"]).to_csv(tmp_path / "t.csv", index=False)
    with routing(real, "least_loaded", journal=tmp_path / "journal") as url:
        words = ["bench", "--cluster", str(real.folder), "--url", url, "--trace", str(tmp_path / "t.csv"), "--exact"]
        assert cli.main([*words, "--lengths", "oracle", "--slo", "ttft_s=5", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    frame = pd.read_parquet(out)
    assert record["status"] == {"ok": 24} and record["goodput_share"] == record["goodput_share_from_send"] == 1.0
    assert [gate["gate"] for gate in record["gates"]] == list(bench.GATES) and all(g["ok"] for g in record["gates"])
    assert (frame["generated_tokens"] == frame["output_tokens"]).all()
    assert set(frame["instance"]) == {0, 1} and set(frame["source"]) == {"hardware"}
    assert len([e for e in journal.read(tmp_path / "journal") if e["event"] == "outcome"]) == 24
    assert summarise(frame)["e2e_mean_s"].iloc[0] > 0


def test_answers_are_collected_from_the_served_model_and_a_length_model_learns_from_them(real, tmp_path, capsys):
    prompts, out = data.generated(40, seed=5)[["prompt"]], tmp_path / "answers.jsonl"
    prompts.to_json(tmp_path / "prompts.jsonl", orient="records", lines=True)
    with routing(real, "least_loaded") as url:
        words = ["length", "collect", "--url", url, "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
        words += ["--api", "completions", "--max-tokens", "64", "--json"]
        asked = []
        for limit in ("16", "40"):  # the second goes on where the first ended
            assert cli.main([*words, "--limit", limit]) == 0
            asked.append(json.loads(capsys.readouterr().out))
    assert [(each["asked"], each["already"], each["failed"]) for each in asked] == [(16, 0, 0), (24, 16, 0)]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["prompt_uid"] for line in lines}) == len(lines) == 40
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(real.tokenizer)
    assert all(line["prompt_tokens"] == len(tokenizer(line["prompt"])["input_ids"]) for line in lines)
    cut = [line["response_tokens"] for line in lines if line["finish_reason"] == "length"]
    assert set(cut) == {64} and len(cut) == sum(each["cut_off"] for each in asked)
    assert all(1 <= line["response_tokens"] <= 64 for line in lines)
    answers = data.load(out)
    assert answers["censored"].sum() == len(cut) and set(answers["model"]) == {real.model}
    fitted, _ = evaluate.train(answers, make("prompt_ridge"), seed=0)
    assert (fitted.predict(answers["prompt"].tolist()) > 0).all()


@measures_time
def test_a_step_cost_fitted_to_the_engines_own_steps_orders_requests_as_they_turn_out(real):
    measured = asyncio.run(engine_cost.measure(real, alone=4, together=24))
    assert set(measured.fit.regimes) == {"decode", "mixed"} and 0 < measured.cost.frontend_s < 1
    assert (measured.alone["generated_tokens"] == measured.alone["output_tokens"]).all()
    real.set_cost(measured.cost)
    assert read_cluster(real.folder).cost == measured.cost
    with routing(real, "astrolabe:k=2") as url:
        unlike = np.random.default_rng(3).permutation(np.linspace(2, 160, 20).astype(int))
        trace = trace_of(20, qps=1.0, seed=3).assign(output_tokens=unlike, predicted_tokens=unlike)
        frame = bench.run(url, trace, bench.Load(real.model))
    assert (frame["status"] == "ok").all() and frame["predicted_e2e_s"].notna().all()
    order = frame[["predicted_e2e_s", "output_tokens"]].corrwith(frame["e2e_s"], method="spearman")
    # Lengths are what decides here; a host that is busy with other things blurs them and predictions alike.
    with by_the_clock():
        assert order["predicted_e2e_s"] > min(0.7, order["output_tokens"] - 0.1), order


def test_a_request_with_a_seed_ends_its_engine_which_is_started_again_and_answers_as_before(real):
    engine = real.engines[0]
    before = StatusReader(engine.status).epoch
    greedy = {"model": real.model, "prompt": [9] * 20, "max_tokens": 12, "temperature": 0}
    answer = ask(engine.url, **greedy)["choices"][0]["text"]
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        # a prompt of two chunks: vLLM turns back the generator of a chunk that emits nothing, which a CPU's cannot
        ask(engine.url, model=real.model, prompt=list(range(5, 400)), max_tokens=4, temperature=1.0, seed=1)
    deadline = time.monotonic() + 600
    while not (real.restarts and any("serves again" in line for line in said)):
        assert time.monotonic() < deadline, said[-3:]
        time.sleep(0.5)
    assert StatusReader(engine.status).epoch != before
    assert ask(engine.url, **greedy)["choices"][0]["text"] == answer
    assert not real.lost and real.engines[1].starts == 1


@pytest.mark.weights
def test_smollm2_answers_a_question_as_a_model_does(tmp_path):
    with (
        launch(1, world="hardware", model="smollm2", engine="max_num_seqs=4,max_model_len=1024", folder=tmp_path / "c",
               timeout_s=900) as cluster,
        routing(cluster, "least_loaded") as url,
    ):  # fmt: skip
        openai = pytest.importorskip("openai")
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        question = {"role": "user", "content": "What is the capital of France? Answer in one word."}
        said = client.chat.completions.create(model="smollm2", messages=[question], temperature=0, max_tokens=40)
        assert "Paris" in said.choices[0].message.content
        assert all(one.ok for one in asyncio.run(bench.check(cluster.urls, "smollm2")))
