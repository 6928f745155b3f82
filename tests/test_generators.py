"""Claims about requests named by a spec: what is drawn, what is read, and which arrivals go with it."""

import pandas as pd
import pytest
from test_servegen import CLIENTS, dataset, trace_csv
from traces import HEADER

from astrolabe_lab import generators
from astrolabe_lab.arrivals import parse, with_arrivals
from astrolabe_lab.errors import InputError
from astrolabe_lab.generators import families, servegen, sharegpt_like


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model, large"
    made.mkdir()
    for name, windows in CLIENTS.items():
        (made / f"{name}-trace.csv").write_text(trace_csv(windows))
        (made / f"{name}-dataset.json").write_text(dataset())
    return made


def test_each_spec_draws_what_its_generator_does(folder):
    for spec, expected in (
        ("sharegpt_like", sharegpt_like.generate(50, seed=3)),
        ("family:documents", families.generate("documents", 50, seed=3)),
        ("family:mixed", families.generate("mixed", 50, seed=3)),
        (f"servegen:{folder}", servegen.generate(folder, 50, seed=3)),
    ):
        pd.testing.assert_frame_equal(generators.requests(spec, 50, seed=3), expected)


def test_text_is_left_out_where_it_is_not_wanted():
    for spec in generators.NAMES:
        assert "prompt" in generators.draw(spec, 5) and "prompt" not in generators.draw(spec, 5, text=False)


def test_servegen_options_follow_the_path_even_one_with_a_comma(folder):
    spec = f"servegen:{folder},start_s=600,duration_s=900,qps=3.5,clients=2,shape=cv,coupled=true,missing=drop"
    options = {"start_s": 600, "duration_s": 900, "qps": 3.5, "clients": 2, "shape": "cv", "coupled": True}
    expected = servegen.generate(folder, None, seed=1, missing="drop", **options)
    pd.testing.assert_frame_equal(generators.requests(spec, seed=1), expected)


def test_two_archives_are_joined_by_a_plus(folder, tmp_path):
    halves = {part: tmp_path / part for part in ("trace.csv", "dataset.json")}
    for part, half in halves.items():
        (half / "m").mkdir(parents=True)
        for file in folder.glob(f"*-{part}"):
            (half / "m" / file.name).write_bytes(file.read_bytes())
    joined = generators.requests(f"servegen:{'+'.join(map(str, halves.values()))}", 60)
    pd.testing.assert_frame_equal(joined, servegen.generate(folder, 60))


def test_anything_else_is_a_trace_file(file):
    path = file(HEADER + "0,0,5,6\n1,1,7,8\n2,2,9,9\n")
    assert generators.requests(path, 2)["prompt_tokens"].tolist() == [5, 7]
    assert generators.requests(str(path), min_prompt_tokens=6)["rid"].tolist() == [1, 2]


def test_the_arrivals_that_go_with_a_spec_can_all_be_parsed():
    assert {generators.arrivals_of(spec) for spec in ("t.csv", "sharegpt_like", "family:chat")} == {"poisson"}
    assert generators.arrivals_of("servegen:d") == "trace"
    assert parse(generators.arrivals_of("family:mixed")).profile.high == 1.7
    assert parse(generators.arrivals_of("family:nobody")).kind == "poisson"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("family:talk", "family:chat, family:documents, family:reasoning, family:mixed"),
        ("servegen:", "the path is missing"),
        ("servegen:,qps=3", "the path is missing"),
        ("servegen:no/such,qsp=3", "'qsp=3' is no option; servegen has start_s, duration_s, qps"),
        ("servegen:no/such,qps=fast", "qps='fast' is not a number"),
        ("servegen:no/such,clients=1.5", "clients='1.5' is not a whole number"),
        ("servegen:no/such,coupled=yes", "true or false"),
        ("servegen:no/such,qps=1,qps=2", "qps is given twice"),
        ("servegen:no/such", "no/such does not exist"),
    ],
)
def test_a_spec_that_is_none_is_named_with_what_is_allowed(spec, says):
    with pytest.raises(InputError, match=says):
        generators.requests(spec, 5)


def test_what_goes_with_files_is_refused_for_generators_and_a_number_is_asked_for():
    with pytest.raises(InputError, match="format, model: this goes with a trace file, and family:chat draws its own"):
        generators.requests("family:chat", 5, model="x", format="csv", on_bad=None)
    with pytest.raises(InputError, match="give their number"):
        generators.requests("family:chat")
    with pytest.raises(InputError, match="generator 't.csv' is unknown: allowed are sharegpt_like, family:chat"):
        generators.draw("t.csv", 5)


def test_a_sweep_over_the_mixed_family_comes_in_its_bursts_unless_told_otherwise():
    from astrolabe_lab.sweep import cell, plan, sources

    def resolved(**changes):
        grid = plan.grid_of("family:mixed", ["random"], [5.0], [1], requests=30, instances=1, **changes)
        known = sources.Sources()
        runs = [cell.resolve(one, known) for one in grid.cells()]
        return [(run.arrivals, cell.arrive(run, known.frames)) for run in runs]

    ((kind, frame),) = resolved()
    drawn = families.generate("mixed", 30, seed=1, text=False)
    expected = with_arrivals(drawn, 5.0, families.ARRIVALS["mixed"], seed=1)
    assert kind == families.ARRIVALS["mixed"] and frame["arrived_s"].equals(expected["arrived_s"])
    assert resolved(arrivals="constant")[0][0] == "constant"
    with pytest.raises(InputError, match="d does not exist: give a folder of ServeGen clients"):
        plan.planned(plan.grid_of("servegen:d", ["random"], [5.0], [1], requests=30))
