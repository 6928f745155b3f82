"""A folder of a model is served under the name of what it was made of, or refused. No vLLM is needed here."""

import json

import pytest

from astrolabe_lab.engines import gguf_model, model_files
from astrolabe_lab.errors import InputError


@pytest.fixture
def conversions(monkeypatch):
    """Files that were converted; no weights are read."""
    done = []

    def write(gguf, folder):
        done.append(gguf.name)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf_model, "PACKAGES", ())
    monkeypatch.setattr(gguf_model, "_write", write)
    return done


def test_a_gguf_model_is_converted_once_and_another_one_is_not_served_in_its_place(tmp_path, conversions):
    one, other, folder = tmp_path / "one.gguf", tmp_path / "other.gguf", tmp_path / "model"
    one.write_bytes(b"GGUF 1")
    other.write_bytes(b"GGUF 22")
    assert gguf_model.convert(one, folder) == gguf_model.convert(one, folder) == folder
    assert conversions == ["one.gguf"]
    with pytest.raises(InputError, match="is not this model: name another folder, or remove it"):
        gguf_model.convert(other, folder)
    one.write_bytes(b"GGUF 333")  # a newer file of the same name
    with pytest.raises(InputError, match="is not this model"):
        gguf_model.convert(one, folder)
    assert conversions == ["one.gguf"]


def test_an_emulated_run_s_model_without_weights_is_not_served_as_a_gguf_model(tmp_path, conversions):
    gguf, folder = tmp_path / "one.gguf", tmp_path / "model"
    gguf.write_bytes(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / model_files.STAMP).write_text(json.dumps({"max_model_len": 4096, "weights": False}))
    with pytest.raises(InputError, match="is not this model"):
        gguf_model.convert(gguf, folder)


def test_a_gguf_file_that_is_not_there_is_named(tmp_path, conversions):
    with pytest.raises(InputError, match=r"none\.gguf cannot be read as a model: No such file"):
        gguf_model.convert(tmp_path / "none.gguf", tmp_path / "model")
