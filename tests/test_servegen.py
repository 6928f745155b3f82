"""Claims about requests drawn from ServeGen's clients: what comes out is what the folder says goes in."""

import ast
import csv
import io
import json
import math
import tarfile
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from astrolabe_lab import trace
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import servegen
from astrolabe_lab.generators.servegen_windows import weibull_shape

INPUTS, OUTPUTS, RATIOS = {10: 0.25, 20: 0.5, 4000: 0.25}, {0: 0.1, 7: 0.6, 300: 0.3}, {0.0: 0.5, 0.5: 0.25, 1.0: 0.25}
# Per client: (rate, cv, law, shape, scale) of each of four windows of 600 s; chunk-10 rests in the second.
CLIENTS = {
    "chunk-2": [(5.0, 1.0, "Gamma", 1.0, 0.2)] * 4,
    "chunk-10": [(2.0, 3.0, "Weibull", 0.4, 0.1), (0, 0, "", 0, 0), (8.0, 3.0, "Weibull", 0.4, 0.1)] * 2,
    "chunk-1": [(0.5, 2.0, "Gamma", 0.25, 8.0)] * 4,
}


def trace_csv(windows, start=0):
    out = io.StringIO()
    csv.writer(out).writerows([start + 600 * i, *window] for i, window in enumerate(windows))
    return out.getvalue()


def dataset(inputs=INPUTS, outputs=OUTPUTS, **more):
    fields = {"input_tokens": str(inputs), "output_tokens": str(outputs)} | {k: str(v) for k, v in more.items()}
    return json.dumps({"0": fields, "1200": fields | {"input_tokens": str({99: 1.0})}, "21600": fields})


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data" / "reason" / "model"
    made.mkdir(parents=True)
    for name, windows in CLIENTS.items():
        (made / f"{name}-trace.csv").write_text(trace_csv(windows[:4]))
        (made / f"{name}-dataset.json").write_text(dataset(reason_ratio=RATIOS))
    (made / "README.md").write_text("not a client")
    return made


def packed(folder, path, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        archive.add(folder, "data/reason/model")
    return path


# --- what comes out


def test_every_client_sends_in_every_window_as_much_as_its_rate_says(folder):
    frame = servegen.generate(folder, seed=1, duration_s=2400)
    trace.check(frame)
    counts = frame.groupby(["client", frame["arrived_s"] // 600]).size()
    for name, windows in CLIENTS.items():
        for i, (rate, *_) in enumerate(windows[:4]):
            assert counts.get((name, i), 0) == rate * 600


def test_lengths_come_from_the_window_s_distribution_and_none_is_zero(folder):
    frame = servegen.generate(folder, seed=2, duration_s=2400)
    early, late = frame[frame["arrived_s"] < 1200], frame[frame["arrived_s"] >= 1200]
    assert set(late["prompt_tokens"]) == {99}
    n = len(early)
    for column, law in (("prompt_tokens", INPUTS), ("reason_ratio", RATIOS)):
        for value, share in law.items():
            assert abs((early[column] == value).sum() - n * share) < 4.5 * math.sqrt(n * share * (1 - share))
    assert set(frame["output_tokens"]) == {1, 7, 300}
    assert abs((frame["output_tokens"] == 1).mean() - 0.1) < 4.5 * math.sqrt(0.09 / len(frame))


def test_lengths_of_a_request_are_independent_unless_coupled(folder):
    def correlation(**options):
        early = servegen.generate(folder, seed=3, duration_s=1200, **options)
        return early[["prompt_tokens", "output_tokens"]].rank().corr().iloc[0, 1], len(early)

    apart, n = correlation()
    assert abs(apart) < 4.5 / math.sqrt(n)
    assert correlation(coupled=True)[0] > 0.7


def test_a_target_rate_scales_all_clients_alike_and_is_met_exactly_on_average(folder):
    rates = [len(servegen.generate(folder, seed=s, duration_s=2400, qps=3.33, clients=["chunk-1"])) for s in range(40)]
    assert set(rates) == {7992} and 3.33 * 2400 == 7992  # 1998 a window
    fractional = [
        len(servegen.generate(folder, seed=s, duration_s=600, qps=0.0126, clients=["chunk-1"])) for s in range(400)
    ]
    assert set(fractional) == {7, 8} and abs(np.mean(fractional) - 7.56) < 4.5 * math.sqrt(0.56 * 0.44 / 400)
    frame = servegen.generate(folder, seed=0, duration_s=2400, qps=20.0)
    assert abs(len(frame) / 2400 - 20) < 12 / 2400 and frame.attrs["rate_factor"] == pytest.approx(20 / 8.5)
    shares = frame["client"].value_counts(normalize=True)
    assert shares["chunk-2"] == pytest.approx(5 / 8.5, abs=2e-3)


def test_the_trace_starts_at_the_time_of_day_asked_for(folder):
    whole = servegen.generate(folder, seed=4, duration_s=2400)
    part = servegen.generate(folder, seed=4, start_s=900, duration_s=700)
    same = whole[(whole["arrived_s"] >= 900) & (whole["arrived_s"] < 1600)]
    np.testing.assert_allclose(part["arrived_s"], same["arrived_s"] - 900, atol=1e-9)
    assert part["prompt_tokens"].tolist() == same["prompt_tokens"].tolist()


def test_the_first_n_are_those_of_the_span_and_more_windows_are_taken_as_needed(folder):
    whole = servegen.generate(folder, seed=5, duration_s=2400)
    for n in (1, 100, 5000, 20_000):
        few = servegen.generate(folder, n, seed=5)
        pd.testing.assert_frame_equal(few, whole.head(n))
    both = servegen.generate(folder, 10, seed=5, duration_s=1200)
    pd.testing.assert_frame_equal(both, whole.head(10))
    assert len(servegen.generate(folder, 3000, seed=5, qps=2.0)) == 3000  # 1,500 s: three windows


def test_leaving_a_client_out_changes_no_other(folder):
    everyone = servegen.generate(folder, seed=6, duration_s=2400)
    two = servegen.generate(folder, seed=6, duration_s=2400, clients=2)
    assert set(two["client"]) == {"chunk-2", "chunk-10"}  # the busiest
    rest = everyone[everyone["client"] != "chunk-1"].reset_index(drop=True)
    pd.testing.assert_frame_equal(two.drop(columns="rid"), rest.drop(columns="rid"))


def test_the_same_seed_gives_the_same_requests_and_another_others(folder):
    one, other = (servegen.generate(folder, seed=s) for s in (7, 8))
    pd.testing.assert_frame_equal(one, servegen.generate(folder, seed=7))
    assert not one["arrived_s"].equals(other["arrived_s"])


def test_what_is_drawn_survives_saving(folder, tmp_path):
    frame = servegen.generate(folder, 200, seed=9)
    for name in ("t.csv", "t.parquet"):
        pd.testing.assert_frame_equal(trace.load(trace.save(frame, tmp_path / name)), frame)
    assert {"client", "reason_ratio"} <= set(frame)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_tar_of_the_folder_gives_the_same_as_the_folder(folder, tmp_path, mode):
    archive = packed(folder, tmp_path / "a.tar", mode)
    pd.testing.assert_frame_equal(servegen.generate(archive, 500, 1), servegen.generate(folder, 500, 1))
    pd.testing.assert_frame_equal(servegen.generate(tmp_path / "data", 500, 1), servegen.generate(folder, 500, 1))


def test_rates_and_lengths_may_lie_in_two_archives(folder, tmp_path):
    expected = servegen.generate(folder, 500, seed=1)
    halves = []
    for part in ("trace.csv", "dataset.json"):
        with tarfile.open(tmp_path / f"{part}.tar", "w") as archive:
            for file in folder.glob(f"*-{part}"):
                archive.add(file, f"data/model/{file.name}")
        halves.append(tmp_path / f"{part}.tar")
    pd.testing.assert_frame_equal(servegen.generate(halves, 500, 1), expected)
    with pytest.raises(InputError, match="give rates and lengths together"):
        servegen.load(halves[1])


def test_the_table_of_clients_says_who_sends_how_much(folder):
    table = servegen.load(folder).table()
    assert table["client"].tolist() == ["chunk-2", "chunk-10", "chunk-1"]
    assert table["mean_rps"].tolist() == [5.0, 3.0, 0.5]
    assert table.set_index("client")["active"].to_dict() == {"chunk-2": 1.0, "chunk-10": 0.75, "chunk-1": 1.0}
    assert table.set_index("client").loc["chunk-1", "cv"] == 2.0


# --- the laws of the gaps, against SciPy's


def gaps_of(frame, client, window_s=600.0):
    rows = frame[frame["client"] == client]
    parts = [np.diff(part) for _, part in rows["arrived_s"].groupby(rows["arrived_s"] // window_s)]
    return np.concatenate([part / part.mean() for part in parts])


@pytest.mark.parametrize(
    ("law", "shape"), [("Gamma", 1.0), ("Gamma", 0.3), ("Gamma", 4.0), ("Weibull", 0.7), ("Weibull", 1.4)]
)
def test_gaps_within_a_window_follow_the_folder_s_law(tmp_path, law, shape):
    stats = pytest.importorskip("scipy.stats", reason="the independent laws are SciPy's")
    (tmp_path / "chunk-0-trace.csv").write_text(trace_csv([(100.0, 1.0, law, shape, 3.0)]))
    (tmp_path / "chunk-0-dataset.json").write_text(dataset())
    gaps = gaps_of(servegen.generate(tmp_path, seed=1, duration_s=600), "chunk-0")
    unit = stats.gamma(shape) if law == "Gamma" else stats.weibull_min(shape)
    distance = stats.kstest(gaps, unit.cdf, args=()).statistic if unit.mean() == 1 else None
    distance = stats.kstest(gaps * unit.mean(), unit.cdf).statistic if distance is None else distance
    other = stats.gamma(shape * 1.1) if law == "Gamma" else stats.weibull_min(shape * 1.1)
    limit = 1.63 / math.sqrt(len(gaps))  # 1 %
    assert len(gaps) == 59_999 and distance < limit
    assert stats.kstest(gaps * other.mean(), other.cdf).statistic > limit
    assert gaps.std() == pytest.approx(unit.std() / unit.mean(), rel=0.05)


@pytest.mark.parametrize("cv", [0.05, 0.3, 1.0, 2.5, 10.0])
def test_the_weibull_shape_has_the_coefficient_of_variation_asked_for(cv):
    stats = pytest.importorskip("scipy.stats", reason="the independent moments are SciPy's")
    law = stats.weibull_min(weibull_shape(cv))
    assert law.std() / law.mean() == pytest.approx(cv, rel=1e-6)


def test_gaps_may_have_the_measured_variation_instead_of_the_fitted_shape(tmp_path):
    (tmp_path / "chunk-0-trace.csv").write_text(trace_csv([(200.0, 1.5, "Weibull", 0.4, 3.0)]))
    (tmp_path / "chunk-0-dataset.json").write_text(dataset())
    pool = servegen.load(tmp_path)
    measured, fitted = (
        gaps_of(servegen.generate(pool, seed=1, duration_s=600, shape=shape), "chunk-0").std()
        for shape in ("cv", "fitted")
    )
    assert measured == pytest.approx(1.5, rel=0.05) and fitted == pytest.approx(3.14, rel=0.1)


# --- the published folder


@pytest.fixture(scope="module")
def published(shared):
    path = shared / "data" / "traces" / "servegen_reason_deepseek-r1.tar.gz"
    if not path.exists():
        pytest.skip("the shared data folder lacks the ServeGen clients")
    windows, lengths = {}, {}
    with tarfile.open(path) as archive:  # read anew, by the folder's description alone
        for member in archive:
            name, _, part = member.name.rpartition("/")[2].rpartition("-")
            text = archive.extractfile(member).read().decode()
            if part == "trace.csv":
                windows[name] = [
                    [float(x) if x[:1].isdigit() else x for x in row] for row in csv.reader(text.splitlines())
                ]
            elif part == "dataset.json":
                lengths[name] = {
                    int(k): {f: ast.literal_eval(t) for f, t in v.items()} for k, v in json.loads(text).items()
                }
    return servegen.load(path), windows, lengths


@pytest.mark.shared
def test_generated_rates_are_the_folder_s_in_every_window_of_every_client(published):
    pool, windows, _ = published
    frame = servegen.generate(pool, seed=1, start_s=36_000, duration_s=7200)
    counts = frame.groupby(["client", frame["arrived_s"] // 600]).size()
    checked = 0
    for name, rows in windows.items():
        for start, rate, *_ in rows:
            if 36_000 <= start < 43_200:
                assert abs(counts.get((name, (start - 36_000) // 600), 0) - rate * 600) < 1
                checked += rate > 0
    assert checked > 100 and len(windows) == 73
    total = sum(row[1] for rows in windows.values() for row in rows if 36_000 <= row[0] < 43_200) / 12
    assert len(frame) / 7200 == pytest.approx(total, rel=1e-3)


@pytest.mark.shared
def test_generated_gaps_vary_as_the_folder_s_law_does(published):
    """In windows of 400 requests or more, where the window's length cuts nothing off: each one's CV and law."""
    stats = pytest.importorskip("scipy.stats", reason="the independent laws are SciPy's")
    pool, windows, _ = published
    frame = servegen.generate(pool, seed=2, start_s=36_000, duration_s=14_400)
    ratios, rejected = [], []
    for name, rows in windows.items():
        for start, rate, _, family, shape, _ in rows:
            if not (36_000 <= start < 50_400 and rate * 600 >= 400):
                continue
            law = stats.gamma(shape) if family == "Gamma" else stats.weibull_min(shape)
            if law.std() / law.mean() > 4:
                continue
            own = frame[(frame["client"] == name) & (frame["arrived_s"] // 600 == (start - 36_000) // 600)]
            gaps = np.diff(own["arrived_s"])
            ratios.append(gaps.std() / gaps.mean() / (law.std() / law.mean()))
            rejected.append(stats.kstest(gaps / gaps.mean() * law.mean(), law.cdf).pvalue < 0.01)
    assert len(ratios) > 40 and np.mean(ratios) == pytest.approx(1, abs=0.02) and np.std(ratios) < 0.15
    assert np.mean(rejected) < 0.05


@pytest.mark.shared
def test_generated_lengths_have_the_folder_s_distributions(published):
    """Chi-square-like and mean tests of the busiest client's lengths, and of all clients' by their shares."""
    pool, windows, lengths = published
    frame = servegen.generate(pool, seed=3, start_s=43_200, duration_s=10_800)  # within one window of lengths
    for name in frame["client"].value_counts().head(5).index:
        rows = frame[frame["client"] == name]
        for column, field in (
            ("prompt_tokens", "input_tokens"),
            ("output_tokens", "output_tokens"),
            ("reason_ratio",) * 2,
        ):
            law = lengths[name][43_200][field]
            values = np.array(sorted(law))
            cdf = np.cumsum([law[v] for v in values])
            sample = np.searchsorted(np.sort(rows[column]), values, side="right") / len(rows)
            assert np.abs(sample - cdf).max() < 1.95 / math.sqrt(len(rows)), (name, field)  # 0.1 %
            mean = sum(v * p for v, p in law.items())
            sd = math.sqrt(max(sum(v * v * p for v, p in law.items()) - mean**2, 0))
            assert abs(rows[column].mean() - mean) < 4.5 * sd / math.sqrt(len(rows)) + 1e-9, (name, field)


@pytest.mark.shared
def test_a_day_of_the_published_clients_has_the_published_rates(published):
    pool, *_ = published
    total = pool.rates_rps.sum(axis=0)
    assert (round(total.mean(), 1), round(total.min(), 1), round(total.max(), 1)) == (16.0, 4.3, 42.5)


# --- damaged and wrong


def test_rates_that_no_memory_holds_are_refused_before_a_request_is_drawn(tmp_path):
    (tmp_path / "chunk-0-trace.csv").write_text("0,1.0,1.0,Gamma,1.0,1.0\n600,1e300,1.0,Gamma,1.0,1.0\n")
    lengths = {"input_tokens": "{5: 1.0}", "output_tokens": "{6: 1.0}"}
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps({"0": lengths}))
    assert len(servegen.generate(tmp_path, 5)) == 5  # the first window has enough
    for options in ({"start_s": 600.0}, {"qps": 1e300}):
        with pytest.raises(InputError, match="more than the 100,000,000 that are drawn at once"):
            servegen.generate(tmp_path, 5, **options)


def test_a_device_is_no_archive_and_what_is_no_tar_is_told_in_a_line(tmp_path):
    with pytest.raises(InputError, match="is a device"):
        servegen.load("/dev/zero")
    (tmp_path / "x.tar").write_text("no tar")
    with pytest.raises(InputError, match="x.tar: not a tar") as raised:
        servegen.load(tmp_path / "x.tar")
    assert "\n" not in str(raised.value)


def edit(folder, name, change):
    path = folder / name
    path.write_text(change(path.read_text()))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("chunk-2-trace.csv", lambda t: t[:-8], r"chunk-2-trace.csv, line 4: \d fields instead of 6"),
        ("chunk-2-trace.csv", lambda t: t.replace("Gamma", "Pareto", 1), "line 1: family 'Pareto' is unknown"),
        ("chunk-2-trace.csv", lambda t: t.replace("5.0", "nan", 1), "line 1: 0,nan,1.0,Gamma.* is no window"),
        (
            "chunk-2-trace.csv",
            lambda t: t.replace("600,", "0,", 1),
            "line 2: 0,5.0.* is no window .allowed: start later",
        ),
        ("chunk-2-trace.csv", lambda t: t.replace("Gamma,1.0", "Gamma,0", 1), "line 1: .* is no window"),
        ("chunk-10-trace.csv", lambda t: t.replace("600,0", "600,1", 1), "line 2: .* is no window"),
        ("chunk-2-trace.csv", lambda t: "", "chunk-2-trace.csv is empty"),
        ("chunk-2-dataset.json", lambda t: t[:-9], "chunk-2-dataset.json: not JSON of windows"),
        ("chunk-2-dataset.json", lambda t: "[1]", "not JSON of windows"),
        ("chunk-2-dataset.json", lambda t: '{"0": 3}', "not JSON of windows"),
        ("chunk-2-dataset.json", lambda t: t.replace("0.25}", "0.2}", 1), "window 0, input_tokens: the prob.* to 0.95"),
        ("chunk-2-dataset.json", lambda t: t.replace("{10: ", "{1.5: ", 1), "a value that is no length"),
        ("chunk-2-dataset.json", lambda t: t.replace("{10: ", "{-1: ", 1), "a value that is no length"),
        ("chunk-2-dataset.json", lambda t: t.replace("{10: 0.25", "{10", 1), "not the text of a mapping"),
        (
            "chunk-2-dataset.json",
            lambda t: t.replace("{10: 0.25", "{__import__('os'): 0.25", 1),
            "not the text of a mapping",
        ),
        (
            "chunk-2-dataset.json",
            lambda t: json.dumps({"0": {"input_tokens": "{}", "output_tokens": "{}"}}),
            "empty, where",
        ),
        (
            "chunk-2-dataset.json",
            lambda t: json.dumps({"0": {"input_tokens": str(INPUTS)}}),
            "window 0: no output_tokens",
        ),
        (
            "chunk-2-dataset.json",
            lambda t: t.replace('"0": ', '"900": ', 1),
            "client chunk-2 has requests at 0 s and no",
        ),
    ],
)
def test_damaged_clients_are_named_by_file_and_line(folder, name, change, says):
    with pytest.raises(InputError, match=says) as raised:
        servegen.generate(edit(folder, name, change), seed=0)
    assert "\n" not in str(raised.value)


def test_clients_without_lengths_are_refused_or_left_out_if_asked(folder):
    (folder / "chunk-2-dataset.json").unlink()
    with pytest.raises(InputError, match=r"1 of 3 clients have no dataset.json \(chunk-2\).*missing='drop'"):
        servegen.load(folder)
    assert "chunk-2" not in set(servegen.generate(folder, seed=0, missing="drop")["client"])
    for path in folder.glob("*-dataset.json"):
        path.unlink()
    with pytest.raises(InputError, match="3 of 3 clients have no dataset"):
        servegen.load(folder, missing="drop")


def test_what_holds_no_clients_or_those_of_two_models_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="no ServeGen clients"):
        (tmp_path / "empty").mkdir()
        servegen.load(tmp_path / "empty")
    with pytest.raises(InputError, match="does not exist"):
        servegen.load(tmp_path / "nowhere")
    other = folder.with_name("other")
    other.mkdir()
    (other / "chunk-0-trace.csv").write_text(trace_csv(CLIENTS["chunk-2"]))
    with pytest.raises(InputError, match=r"several models \(reason/model, reason/other\); give the folder of one"):
        servegen.load(tmp_path / "data")


def test_an_archive_cut_short_or_none_is_refused(folder, tmp_path):
    whole = packed(folder, tmp_path / "a.tar.gz").read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-40], b"no archive at all", b""):
        (tmp_path / "b.tar.gz").write_bytes(content)
        with pytest.raises(InputError, match="not a tar, or cut short or damaged"):
            servegen.load(tmp_path / "b.tar.gz")


def test_an_archive_that_unpacks_without_end_is_refused(folder, tmp_path, monkeypatch):
    from astrolabe_lab.generators import servegen_files

    monkeypatch.setattr(servegen_files, "MAX_UNPACKED", 100)
    with pytest.raises(InputError, match="unpacks to more than 100 bytes"):
        servegen.load(packed(folder, tmp_path / "a.tar.gz"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 0}, "integer >= 1"),
        ({"n": 10**6}, r"send 20,400 requests in this span, 1,000,000 are asked for"),
        ({"n": 10**6, "duration_s": 600}, "are asked for: begin earlier"),
        ({"seed": -1}, "seed="),
        ({"qps": 0}, "qps=0"),
        ({"qps": "3"}, "qps='3'"),
        ({"duration_s": math.inf}, "duration_s=inf"),
        ({"duration_s": 9999}, "passes the last window's end, 2400 s"),
        ({"start_s": 2400}, "start_s=2400 is outside the windows there are: from 0 to 2400"),
        ({"start_s": -1}, "outside the windows"),
        ({"clients": 4}, "from 1 to 3, or a list of names"),
        ({"clients": 0}, "from 1 to 3"),
        ({"clients": ["chunk-3"]}, "the names there are chunk-1, chunk-2, chunk-10"),
        ({"clients": ["chunk-10"], "start_s": 600, "duration_s": 600}, "no client sends anything from 600 to 1200 s"),
        ({"shape": "p1"}, "allowed are fitted and cv"),
        ({"missing": "ignore"}, "allowed are error and drop"),
    ],
)
def test_wrong_arguments_are_named_with_what_is_allowed(folder, options, says):
    with pytest.raises(InputError, match=says):
        servegen.generate(folder, **options)


def test_windows_follow_one_another(folder):
    pool = servegen.load(folder)
    assert pool.window_s == 600 and all(b - a == 600 for a, b in pairwise(pool.starts_s))
