"""URLs of engines and services: what every command that takes them says of those that are none."""

import pytest
from clusters import COST

from astrolabe_lab import InputError
from astrolabe_lab.calibrate.live import engines_at
from astrolabe_lab.cli import main
from astrolabe_lab.engines.cluster_file import write_cluster
from astrolabe_lab.serve.lengths import lengths_of
from astrolabe_lab.sim.config import EngineConfig
from astrolabe_lab.urls import url_of, urls_of

GOOD = "http://127.0.0.1:9"
ROUTE, CALIBRATE = ["route", "--constants-from", "paper"], ["calibrate", "--out", "c.json"]
BENCH = ["bench", "--trace", "sharegpt_like", "--requests", "5", "--qps", "1", "--out", "r.csv"]
LISTS = [
    (["route"], "--engines"),
    ([*ROUTE, "--decode", GOOD], "--prefill"),
    ([*ROUTE, "--prefill", GOOD], "--decode"),
    (["route", "--cluster", "CLUSTER"], "--sidecars"),
    (CALIBRATE, "--engines"),
    ([*CALIBRATE, "--decode", GOOD], "--prefill"),
    ([*CALIBRATE, "--prefill", GOOD], "--decode"),
    ([*BENCH, "--url", GOOD], "--engines"),
]
SINGLE = [
    (BENCH, "--url"),
    (["length", "collect", "--prompts", "sharegpt_like:20", "--out", "a.jsonl"], "--url"),
]
NONE = ["127.0.0.1:9", "ftp://127.0.0.1:9", "http://", "http://:9", "http://127.0.0.1:port", "http://127.0.0.1 :9"]
WRONG = [(bad, "is not a URL") for bad in NONE] + [
    (" ", "names none"),
    (f"{GOOD},", "has a blank"),
    (f"{GOOD},,http://127.0.0.1:10", "has a blank"),
    (f"{GOOD},here", "'here' is not a URL"),
    (f"{GOOD},{GOOD}/", f"names {GOOD} more than once"),
]


def refused(words, option, given, tmp_path, monkeypatch, capsys):
    """The one line that the command says; it leaves no file."""
    places = [{"url": GOOD, "role": "engine", "status": str(tmp_path / "s"), "log": ""}]
    write_cluster(tmp_path, places, EngineConfig(), COST, 1.0, "m", "", "emulated")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    words = [str(tmp_path) if word == "CLUSTER" else word for word in words]
    assert main([*words, option, given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not list(here.iterdir())
    return line


@pytest.mark.parametrize(("given", "said"), WRONG)
@pytest.mark.parametrize(("words", "option"), LISTS)
def test_every_command_refuses_urls_that_are_none_in_one_line(
    words, option, given, said, tmp_path, monkeypatch, capsys
):
    line = refused(words, option, given, tmp_path, monkeypatch, capsys)
    assert f"{option} {given!r}: " in line and said in line and "give URLs like http://127.0.0.1:8001" in line


@pytest.mark.parametrize("given", [*NONE, "", " ", f"{GOOD},http://127.0.0.1:10"])
@pytest.mark.parametrize(("words", "option"), SINGLE)
def test_a_command_that_takes_one_url_refuses_what_is_none(words, option, given, tmp_path, monkeypatch, capsys):
    line = refused(words, option, given, tmp_path, monkeypatch, capsys)
    assert f"{option} {given!r} is not a URL like http://127.0.0.1:8001" in line


@pytest.mark.parametrize(("words", "option"), [each for each in LISTS if each[0][0] != "calibrate"])
def test_an_option_given_empty_is_not_taken_for_one_left_out(words, option, tmp_path, monkeypatch, capsys):
    assert f"{option} '': names none" in refused(words, option, "", tmp_path, monkeypatch, capsys)


def test_what_is_right_comes_back_without_blanks_and_trailing_slashes():
    assert urls_of(f" {GOOD}/ , https://host/v1", "x") == urls_of([f"{GOOD}/", "https://host/v1"], "x")
    assert urls_of(f"{GOOD}/", "x") == [url_of(f" {GOOD}/", "x")] == [GOOD]
    assert url_of("HTTP://[::1]:8000", "x") == "HTTP://[::1]:8000"


@pytest.mark.parametrize("given", [None, [], (), [None], [GOOD, 7]])
def test_a_sequence_is_checked_as_a_text_is(given):
    with pytest.raises(InputError, match="^engines "):
        urls_of(given, "engines")


def test_engines_are_asked_nothing_before_all_urls_are_right():
    with pytest.raises(InputError, match="--decode 'here': 'here' is not a URL"):
        engines_at(GOOD, "here")
    with pytest.raises(InputError, match="--engines '': names none"):
        engines_at("")


def test_a_tagging_service_is_at_a_url():
    with pytest.raises(InputError, match="lengths tagger 'http://:8100' is not a URL"):
        lengths_of("tagger:http://:8100,deadline_ms=5")
