"""Where a command writes is looked at before it measures or simulates: what it reads is absent in every test here."""

import pytest

from astrolabe_lab.cli import main
from astrolabe_lab.record import write_whole
from astrolabe_lab.result import check_folder, check_output

NOWHERE = "http://127.0.0.1:9"
FILES = {
    "bench": (f"bench --url {NOWHERE} --trace absent.csv", "--out", "r.parquet"),
    "calibrate": (f"calibrate --engines {NOWHERE}", "--out", "c.json"),
    "calibrate's figures": (f"calibrate --engines {NOWHERE} --out c.json", "--figures", "c.html"),
    "simulate": ("simulate --trace absent.csv --policy random --instances 2", "--out", "r.csv"),
    "fidelity": ("fidelity --timings absent --run absent", "--out", "r.parquet"),
    "length collect": (f"length collect --url {NOWHERE} --prompts absent.jsonl", "--out", "a.jsonl"),
    "length evaluate": ("length evaluate --data absent.csv", "--out", "p.parquet"),
    "report": ("report absent", "--out", "r.html"),
    "trace make": ("trace make absent.csv", "--out", "t.csv"),
}
FOLDERS = {
    "capacity": ("capacity --trace absent.csv --policy random --instances 2", "--out"),
    "sweep": ("sweep absent.yaml", "--out"),
    "sweep on pools": ("sweep absent.yaml --cluster absent", "--out"),
    "studies": ("studies", "--out"),
    "studies on pools": ("studies --cluster absent", "--out"),
    "run": ("run absent.ipynb", "--out"),
    "length train": ("length train --data absent.csv", "--out"),
    "checkpoints": ("length train --data absent.csv --model encoder:fine_tune=true --out new", "--checkpoint"),
    "splits": ("length evaluate --data absent.csv", "--splits-dir"),
    "length recalibrate": ("length recalibrate --journal absent.jsonl --model absent", "--out"),
    "length retrain": ("length retrain --journal absent.jsonl --model absent", "--out"),
}
KEPT = {"capacity": "capacity.json", "sweep": "summary.parquet", "studies": "bursty.yaml"}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """The one line in which a command is refused, after which all is as it was."""
    monkeypatch.chdir(tmp_path)

    def ask(words, *output):
        before = sorted(tmp_path.rglob("*"))
        assert main([*words.split(), *output]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert sorted(tmp_path.rglob("*")) == before and ".partial" not in line
        return line

    return ask


@pytest.mark.parametrize(("words", "option", "name"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(refused, tmp_path, words, option, name):
    (tmp_path / name).mkdir()
    assert refused(words, option, name).startswith(f"astrolabe: error: {option} {name} is a folder")
    assert refused(words, option, f"/proc/{name}").startswith(f"astrolabe: error: {option} /proc/{name}: cannot write")
    (tmp_path / "file").touch()
    assert refused(words, option, f"file/{name}").startswith(f"astrolabe: error: {option} file/{name}: ")


@pytest.mark.parametrize(("words", "option"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(refused, tmp_path, words, option):
    (tmp_path / "file").touch()
    assert refused(words, option, "file").startswith(f"astrolabe: error: {option} file is a file")
    assert refused(words, option, "file/new").startswith(f"astrolabe: error: {option} file/new: cannot write")
    assert refused(words, option, "/proc/new").startswith(f"astrolabe: error: {option} /proc/new: cannot write")


@pytest.mark.parametrize(("command", "name"), KEPT.items())
def test_a_folder_in_the_place_of_a_file_of_the_output_is_refused_before_the_work(refused, tmp_path, command, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    words, option = FOLDERS[command]
    assert refused(words, option, "out").startswith(f"astrolabe: error: {option} out/{name} is a folder")


def test_looking_at_an_output_leaves_nothing_and_spoils_nothing(tmp_path):
    old = tmp_path / "old.csv"
    old.write_text("kept")
    for path in (check_output(old), check_folder(tmp_path), check_folder(tmp_path / "a/b")):
        assert path.exists() == (path != tmp_path / "a/b")
    check_output(tmp_path / "a/b/c.csv", make=True)
    assert old.read_text() == "kept" and list(tmp_path.iterdir()) == [old]


def test_an_error_of_writing_names_the_file_that_was_asked_for(tmp_path):
    (tmp_path / "dd.json").mkdir()
    with pytest.raises(OSError) as raised:
        write_whole(tmp_path / "dd.json", "{}")
    assert raised.value.filename == str(tmp_path / "dd.json")
