"""The documents tell the truth: README's snippets run as they stand, and every file the documents name is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.server import Server
from tokenmill.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tokenmill"
DOCS = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
README = DOCS["README.md"]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
SHELL = re.findall(r"```sh\n(.*?)```", README, re.S)
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(smollm2_path):
    server = Server("smollm2-135m-instruct")
    yield server
    server.stop()


def run(arguments, **kwargs) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", [code for code in PYTHON if ADDRESS not in code])
def test_python_snippets_run(code, smollm2_path):
    output = run([sys.executable, "-c", code])
    assert len(output.split()) > 3
    if "The capital of France is" in code:
        assert "The capital of France is Paris" in output


@pytest.mark.parametrize("code", [code for code in PYTHON if ADDRESS in code])
def test_the_sdk_snippet_runs(code, server):
    assert "Paris" in run([sys.executable, "-c", code.replace(ADDRESS, server.url)])


@pytest.mark.parametrize("code", SHELL)
def test_the_curl_snippet_runs(code, server):
    output = run(["sh", "-c", code.replace(ADDRESS, server.url)])
    assert "data: {" in output and output.rstrip().endswith("data: [DONE]")


def test_snippets_were_found():
    assert len(PYTHON) == 3 and len(SHELL) == 1


def test_the_readme_lists_every_command():
    shown = set(re.findall(r"`(?:tokenmill )?(\w+)[ `]", README))
    assert set(COMMANDS) <= shown


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name):
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\((?!http)([^)#]+)", DOCS[name]):
        assert (folder / target).exists(), target


@pytest.mark.parametrize("name", [n for n in DOCS if n != "log.md"])
def test_files_named_are_there(name):
    """`server/app.py` is src/tokenmill/server/app.py, or counts from the repository's root; a bare name is anywhere."""
    for target in re.findall(r"`((?:\w+/)*\w+\.(?:py|cpp|h)|(?:\w+/)+)`", DOCS[name]):
        found = any((base / target).exists() for base in (SOURCE, ROOT, ROOT / "src"))
        assert found or ("/" not in target and any(SOURCE.rglob(target))), target
