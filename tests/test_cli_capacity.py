"""``astrolabe capacity``: one JSON object, kept runs, and what is refused."""

import json

import pandas as pd
import pytest

from astrolabe_lab import cli

QUICK = (
    "capacity --trace sharegpt_like --policy least_loaded --instances 2 --requests 80 --kind finite --seeds 2 "
    "--qps 2,10 --coarse-qps 4 --fine-qps 2 --limit-s 0.5 --workers 1"
)


def asked(capsys, words):
    code = cli.main(words.split())
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_capacity_comes_as_one_json_object_and_as_a_sentence(capsys, tmp_path):
    code, out, err = asked(capsys, f"{QUICK} --out {tmp_path}/kept --json")
    record = json.loads(out)
    (one,) = record["capacities"]
    assert code == 0 and out.count("\n") == 1
    assert (one["kind"], one["policy"], one["n"], one["seeds"]) == ("finite", "least_loaded", 80, 2)
    assert 2 <= one["mean_qps"] <= 10 and len(one["per_seed"]) == 2
    assert record["engine"]["max_num_seqs"] == 48 and record["source"] == "simulated"
    assert "capacity: least_loaded, finite(80)" in err, "progress goes to stderr"
    assert json.loads((tmp_path / "kept/capacity.json").read_text()) == record
    table = pd.read_parquet(tmp_path / "kept/capacity.parquet")
    assert table["capacity_qps"].tolist() == [one["mean_qps"]]
    code, out, _ = asked(capsys, f"{QUICK} --out {tmp_path}/kept")
    assert code == 0 and "requests/s at P99 TTFT <= 0.5 s (finite(80), 2 seeds, fewer than the 10" in out
    assert f"{one['mean_qps']:.2f}" in out


def test_pools_are_told_what_finds_their_rate(capsys):
    code, _, err = asked(capsys, "capacity --trace family:mixed --policy marginal_cost --pools 1+2")
    assert code == 2 and err.count("\n") == 1 and "a capacity is of whole engines (--instances N)" in err
    assert "`astrolabe studies`" in err and "disagg.saturation.find" in err


def test_a_trace_that_can_never_keep_the_limit_is_refused_with_the_reason(capsys, tmp_path):
    rows = [(100, 20)] * 95 + [(9000, 20)] * 5
    pd.DataFrame(rows, columns=["prompt_tokens", "output_tokens"]).to_csv(tmp_path / "t.csv", index_label="rid")
    code, out, err = asked(capsys, QUICK.replace("sharegpt_like", f"{tmp_path}/t.csv"))
    assert code == 2 and not out
    assert "of 80 requests (longer than max_model_len" in err
    assert "max_model_len" in err and "--filter max_total_tokens=N" in err


def test_a_finite_capacity_says_what_it_leaves_out_and_which_lengths_it_took(capsys):
    _, out, _ = asked(capsys, QUICK)
    assert out.startswith("predicted lengths: oracle\n") and "overstates what the cluster bears for good" in out


def test_policies_are_set_against_a_baseline_seed_by_seed(capsys):
    words = f"{QUICK} --policy random --baseline random".replace("2,10", "1,40")
    code, out, _ = asked(capsys, words + " --json")
    record = json.loads(out)
    assert code == 0 and [one["policy"] for one in record["differences"]] == ["least_loaded"]
    assert record["differences"][0]["mean"] == pytest.approx(
        record["capacities"][0]["mean_qps"] - record["capacities"][1]["mean_qps"]
    )


def test_of_bounds_there_is_no_difference_and_the_search_is_not_lost(capsys):
    words = f"{QUICK} --policy random --baseline random".replace("--limit-s 0.5", "--limit-s 900")
    code, out, _ = asked(capsys, words)
    assert code == 0 and "no differences: of a bound (least_loaded, finite; random, finite) there is none" in out
    assert ">= 10.00 requests/s" in out and "2 cross outside the rates searched" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (QUICK.replace("least_loaded", "jsq"), "policy 'jsq' is unknown"),
        (QUICK + " --baseline random", "--baseline random is not among the policies"),
        (QUICK.replace("2,10", "10,2"), "want 0 < low < high"),
        (QUICK.replace("2,10", "some"), "'some' is not LOW,HIGH in requests a second"),
        (QUICK.replace("--kind finite", "--kind sustained --sustained-requests 50"), "needs runs of 30,000 requests"),
        (QUICK.replace("sharegpt_like", "nothing.csv"), "nothing.csv"),
        (QUICK.replace("--seeds 2", "--seeds 0"), "is not a whole number from 1 up"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_two(words, message, capsys):
    code, out, err = asked(capsys, words)
    assert code == 2 and out == "" and message in err
    assert err.splitlines()[-1].startswith("astrolabe: error:")
