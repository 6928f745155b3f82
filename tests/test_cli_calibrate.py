"""``astrolabe calibrate``, and what ``astrolabe route`` makes of its file."""

import json
import re
from types import SimpleNamespace

import pytest

from astrolabe_lab import InputError
from astrolabe_lab.calibrate import SimulatedTarget, calibrate, load
from astrolabe_lab.cli import _parse, main
from astrolabe_lab.cli.calibrate import calibrated
from astrolabe_lab.cli.route_pools import are_meant, pool_router
from astrolabe_lab.cost import StepCost
from astrolabe_lab.sim.config import EngineConfig

ENGINE = "max_num_seqs=8,num_gpu_blocks=256"
CONFIG = EngineConfig.parse(ENGINE)
COST = StepCost.parse("base_s=0.01,per_seq_s=1e-4,per_kv_token_s=1e-7,mixed.per_token_s=5e-5")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    found = calibrate(SimulatedTarget(CONFIG, COST, model="m"), budget_s=60, rounds=1, progress=lambda line: None)
    return str(found.save(tmp_path_factory.mktemp("calibration") / "c.json"))


def options(**given):
    """The options of ``astrolabe route``, where not given its own defaults."""
    known = vars(_parse(["route", "--engines", "replaced"])) | {"engines": None, "model": "m"}
    return SimpleNamespace(**known | given)


def test_the_command_writes_the_file_its_figures_and_one_json_object(tmp_path, capsys):
    out, page = tmp_path / "C.json", tmp_path / "C.html"
    command = ["calibrate", "--simulate", "llama2-7b-a30", "--engine", ENGINE, "--rounds", "1", "--out", str(out)]
    assert main([*command, "--figures", str(page), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["valid"] and record["seconds"] < 300 and record["rounds"] == 1
    assert load(out).constants().to_dict() == record["constants"]
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', page.read_text())
    assert main(command) == 0
    assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--simulate", "nothing", "--out", "c.json"], "unknown preset 'nothing'"),
        (["--simulate", "llama2-7b-a30", "--out", "c.txt"], "must end in .json"),
        (["--prefill", "http://127.0.0.1:1", "--out", "c.json"], "go together"),
        (["--engines", "127.0.0.1:1", "--out", "c.json"], "is not a URL"),
        (["--engines", "http://127.0.0.1:9", "--out", "c.json"], "does not list its models"),
        (["--cluster", "/nowhere", "--out", "c.json"], "astrolabe launch makes it"),
        (["--cluster", "/nowhere", "--model", "m", "--out", "c.json"], "--model is of engines at URLs"),
        (["--cluster", "/nowhere", "--engine", "block_size=8", "--out", "c.json"], "--engine is of engines at URLs"),
        (["--cluster", "/nowhere", "--device", "A40", "--out", "c.json"], "the folder of --cluster says its own"),
        (["--cluster", "/nowhere", "--time-scale", "2", "--out", "c.json"], "--time-scale is of engines at URLs"),
        (["--simulate", "llama2-7b-a30", "--device", "A40", "--out", "c.json"], "an engine of --simulate has none"),
        (["--simulate", "llama2-7b-a30", "--model", "m", "--out", "c.json"], "--model is of engines at URLs"),
        (["--simulate", "llama2-7b-a30", "--budget-s", "2", "--out", "c.json"], "one round needs about"),
    ],
)
def test_wrong_use_is_one_sentence_and_code_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_router_refuses_another_model_device_or_flag_and_takes_anything_as_constants_from(file, capsys):
    url = "http://127.0.0.1:9"
    with pytest.raises(InputError, match="model 'm', here 'other'"):
        calibrated(options(calibration=file, engines=url, model="other"), "other", CONFIG)
    with pytest.raises(InputError, match="device 'simulated"):
        calibrated(options(calibration=file, engines=url), "m", CONFIG)
    elsewhere = options(calibration=file, engines="http://192.0.2.1:9", engine="max_num_seqs=9")
    with pytest.raises(InputError, match="max_num_seqs 8, here 9"):
        calibrated(elsewhere, "m", EngineConfig.parse("max_num_seqs=9,num_gpu_blocks=256"))
    config, found = calibrated(options(constants_from=file, engines=url, model="other"), "other", EngineConfig())
    assert config == CONFIG and found.model == "m"
    assert "whatever they belong to" in capsys.readouterr().err
    with pytest.raises(InputError, match="not both"):
        calibrated(options(constants_from=file, calibration=file, engines=url), "m", CONFIG)


def test_flags_that_nobody_gave_and_a_device_that_was_named_are_no_reason_to_refuse_a_calibration(file, capsys):
    url, device = "http://127.0.0.1:9", load(file).device
    with pytest.raises(InputError, match=f"device '{device}', here 'A40'"):
        calibrated(options(calibration=file, engines=url, device="A40"), "m", EngineConfig())
    config, _ = calibrated(options(calibration=file, engines=url, device=device), "m", EngineConfig())
    assert config == CONFIG and "does not tell its flags" in capsys.readouterr().err
    given = options(calibration=file, engines=url, device=device, engine="max_num_seqs=8")
    assert calibrated(given, "m", EngineConfig.parse("max_num_seqs=8"))[0] == CONFIG
    with pytest.raises(InputError, match=r"max_num_seqs 8, here 9\. Calibrate"):
        given.engine = "max_num_seqs=9"
        calibrated(given, "m", EngineConfig.parse("max_num_seqs=9"))
    changed = options(constants_from=file, engines=url, engine="block_size=32")
    assert calibrated(changed, "m", EngineConfig())[0] == EngineConfig.parse("block_size=32", CONFIG)
    with pytest.raises(InputError, match="--preset and a calibration both tell"):
        calibrated(options(calibration=file, engines=url, preset="llama2-7b-a30"), "m", EngineConfig())


def test_a_device_that_cannot_be_checked_is_said(file, capsys, monkeypatch):
    monkeypatch.setattr("astrolabe_lab.calibrate.live._get_text", lambda url: None)
    calibrated(options(calibration=file, engines="http://gpu.example:8000"), "m", EngineConfig())
    assert "http://gpu.example:8000 is on another machine, so its device is not checked" in capsys.readouterr().err
    with pytest.raises(InputError, match="here 'A40'"):
        calibrated(options(calibration=file, engines="http://gpu.example:8000", device="A40"), "m", EngineConfig())


def test_a_router_of_pools_prices_with_what_it_is_given(file):
    pools = {"prefill": "http://127.0.0.1:8", "decode": "http://127.0.0.1:9,http://127.0.0.1:10"}
    assert are_meant(options(**pools)) and not are_meant(options(engines="http://127.0.0.1:9"))
    router = pool_router(options(**pools, constants_from=file))
    assert router.policy_name == "marginal_cost" and (router.n_prefill, len(router.instances)) == (1, 3)
    assert router.constants == load(file).constants() and len(router.drift.watches) == 3
    assert pool_router(options(**pools, constants_from="paper-simulator")).constants.decode_step_s == 0.0018
    with pytest.raises(InputError, match="not both"):
        pool_router(options(**pools, constants_from="paper", calibration=file))
    with pytest.raises(InputError, match="give --calibration"):
        pool_router(options(**pools))
    with pytest.raises(InputError, match="go together"):
        are_meant(options(prefill="http://127.0.0.1:9"))
    with pytest.raises(InputError, match="is not a URL"):
        pool_router(options(prefill="http://127.0.0.1:9", decode="here", constants_from="paper"))
    with pytest.raises(InputError, match="unknown for pools"):
        pool_router(options(**pools, constants_from="paper", policy="astrolabe"))
