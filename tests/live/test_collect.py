"""``astrolabe length collect`` against vLLM itself: a small random model on the CPU whose answers end by chance."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from astrolabe_lab.generators import sharegpt_like
from astrolabe_lab.length import data
from astrolabe_lab.serve import model_files
from astrolabe_lab.serve.launch import launch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS, LONGEST = 40, 512  # requests; tokens of a prompt and its answer


def short_prompts(folder, seed):
    """(their texts, the file that has them): some that leave room for an answer."""
    drawn = sharegpt_like.generate(20 * PROMPTS, seed=seed)
    texts = drawn["prompt"][drawn["prompt_tokens"] < 60].drop_duplicates().tolist()[:PROMPTS]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return texts, str(path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The URL of a real engine. A random model hardly ever says the end token: its logit varies more here."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("collect")
    model = model_files.write(folder / "model", max_model_len=LONGEST, weights=True, layers=2)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][model_files.SPECIAL.index("</s>")] *= 10
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with launch(1, world="hardware", device="cpu", model=model, folder=folder / "c", timeout_s=600) as running:
        yield running.urls[0]


def counters(url):
    """vLLM's own account: answers by how they ended, and tokens generated."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    ended = re.findall(r'^vllm:request_success_total{.*finished_reason="(\w+)".*} (\S+)$', text, re.M)
    tokens = re.findall(r"^vllm:generation_tokens_total{.*} (\S+)$", text, re.M)
    return {reason: float(count) for reason, count in ended} | {"tokens": sum(map(float, tokens))}


def collect(url, out, *more):
    words = ["length", "collect", "--url", url, "--out", str(out), *more, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "astrolabe_lab.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def rows_of(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_lengths_are_the_tokens_that_vllm_counts_and_answers_end_by_themselves(engine, tmp_path):
    out, before = tmp_path / "answers.jsonl", counters(engine)
    running = collect(engine, out, "--prompts", short_prompts(tmp_path, 0)[1])
    said = json.loads(running.communicate(timeout=300)[0])
    after, rows = counters(engine), rows_of(out)
    assert running.returncode == 0 and said["failed"] == 0
    assert said["asked"] == said["answered"] == PROMPTS == len(rows) == len({row["prompt_uid"] for row in rows})
    ended = {reason: sum(row["finish_reason"] == reason for row in rows) for reason in ("stop", "length")}
    assert ended == {reason: after[reason] - before[reason] for reason in ended}
    assert ended["stop"] > 0.2 * len(rows), "hardly an answer ended by itself: lower the model's longest answer"
    assert sum(row["response_tokens"] for row in rows) == after["tokens"] - before["tokens"]
    frame = data.load(out)
    assert len(frame) == len(rows) and frame["censored"].sum() == ended["length"] == said["cut_off"]


def test_killed_in_the_middle_it_goes_on_and_every_prompt_is_answered_once(engine, tmp_path):
    (texts, prompts), out = short_prompts(tmp_path, 5), tmp_path / "answers.jsonl"
    asked = ("--prompts", prompts, "--concurrency", "2")
    first = collect(engine, out, *asked)
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s and not (out.exists() and len(out.read_text().splitlines()) >= 5):
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = rows_of(out)
    assert 5 <= len(kept) < PROMPTS
    second = collect(engine, out, *asked)
    said = json.loads(second.communicate(timeout=300)[0])
    assert second.returncode == 0 and said["already"] == len(kept)
    assert rows_of(out)[: len(kept)] == kept
    uids = [row["prompt_uid"] for row in rows_of(out)]
    assert len(uids) == len(set(uids)) and set(uids) == {data.prompt_uid(text) for text in texts}
