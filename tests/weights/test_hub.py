"""hf: references against a stand-in of the hub's HTTP API, through huggingface-hub itself."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import pytest
from huggingface_hub import constants

from tests.support.checkpoints import gguf_file, hf_folder
from tests.support.gguf_writer import split_gguf
from tokenmill.errors import SourceError, TokenmillError
from tokenmill.weights import sources
from tokenmill.weights.loader import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD = "fedcba9876543210fedcba9876543210fedcba98"
TOKEN = "hf_letmein"


def act(what, ref, revision):
    """What a test asks for, as JSON-able values; errors too."""
    try:
        if what == "pull":
            path = sources.resolve(ref, revision=revision or None)
            checkpoint = open_checkpoint(path)
            return {"path": str(path), "tensors": len(checkpoint.weights), "name": checkpoint.name}
        if what == "list":
            return [model.name for model in sources.local_models()]
        return sources.remove(ref)
    except TokenmillError as e:
        return {"error": type(e).__name__, "message": str(e)}


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.revisions = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD, OLD: OLD}
        self.stop_after = None
        self.requests: list[tuple[str, str, str | None]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub: Hub = self.server
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        hub.requests.append((self.command, path, self.headers.get("Range")))
        repo, revision, rest = self.parse(path)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in hub.repos or (repo in hub.private and not known):
            return self.answer(401 if not known else 404, error="RepoNotFound")
        if revision not in hub.revisions:
            return self.answer(404, error="RevisionNotFound")
        files = hub.repos[repo]
        if path.startswith("api/"):
            siblings = [{"rfilename": name} for name in files]
            if "/tree/" in path:
                body = [{"type": "file", "path": n, "size": len(c), "oid": digest(c)[:40]} for n, c in files.items()]
            else:
                body = {"id": repo, "modelId": repo, "sha": hub.revisions[revision], "siblings": siblings, "tags": []}
            return self.answer(200, json.dumps(body).encode(), kind="application/json")
        if repo in hub.gated and not known:
            return self.answer(403, error="GatedRepo")
        if rest not in files:
            return self.answer(404, error="EntryNotFound")
        content, start, status = files[rest], 0, 200
        if asked := self.headers.get("Range"):
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
        stop, hub.stop_after = (
            (hub.stop_after, None) if self.command == "GET" and len(content) > 50_000 else (None, hub.stop_after)
        )
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": hub.revisions[revision], "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self.answer(status, content[start:], headers=headers, cut=stop)

    @staticmethod
    def parse(path):
        parts = path.split("/")
        if parts[0] == "api":  # api/models/org/name[/revision/R | /tree/R]
            return "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", None
        return "/".join(parts[:2]), parts[3], "/".join(parts[4:])  # org/name/resolve/R/file

    def answer(self, status, body=b"", *, kind="application/octet-stream", headers=None, error=None, cut=None):
        self.send_response(status)
        for key, item in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, item)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True


def digest(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("hub")
    folder = hf_folder(tmp / "folder", "llama", shards=2)
    file = gguf_file(tmp / "tiny-Q8_0.gguf", "llama", format="Q8_0")
    (tmp / "split").mkdir()
    parts = split_gguf(file, tmp / "split", 3, stem="big-Q4_K_M")
    return {
        "org/folder": {p.name: p.read_bytes() for p in folder.iterdir()}
        | {"pytorch_model.bin": b"p" * 1000, "x/y.py": b""},
        "org/files": {
            "README.md": b"hello",
            "tiny-Q8_0.gguf": file.read_bytes(),
            "tiny-Q4_K_M.gguf": b"not fetched",
            **{f"big/{p.name}": p.read_bytes() for p in parts},
        },
        "org/one": {"only.gguf": file.read_bytes(), "mmproj-only.gguf": b"x"},
        "org/empty": {"README.md": b"hello"},
    }


@pytest.fixture
def hub(content):
    server = Hub()
    server.repos = content
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def call(hub, tmp_path, monkeypatch):
    """act() with huggingface-hub's settings as given; it reads its environment once, so they are set behind it."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in list(os.environ):
        if "proxy" in name.lower():
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))

    def run(what, ref="", revision="", **settings):
        with monkeypatch.context() as patch:
            endpoint = settings.get("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
            template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)
            patch.setattr(constants, "ENDPOINT", endpoint)
            patch.setattr(constants, "HF_HUB_OFFLINE", "HF_HUB_OFFLINE" in settings)
            patch.setenv("HF_TOKEN", settings.get("HF_TOKEN", ""))
            return act(what, ref, revision)

    return run


def test_the_hubs_own_settings(hub, tmp_path):
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE from the environment of a process."""
    hub.private.add("org/one")
    command = [
        sys.executable,
        "-c",
        "import sys; from tokenmill.weights.sources import resolve; print(resolve(sys.argv[1]))",
    ]

    def child(ref="hf:org/one", **settings):
        kept = {
            key: item for key, item in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
        }
        environment = kept | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"} | settings
        return subprocess.run([*command, ref], capture_output=True, text=True, env=environment, timeout=120)

    online = child(HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_TOKEN=TOKEN)
    assert online.returncode == 0, online.stderr
    assert online.stdout.startswith(str(tmp_path / "hf"))
    assert child(HF_HUB_OFFLINE="1").stdout == online.stdout
    assert "HF_HUB_OFFLINE is set" in child("hf:org/files", HF_HUB_OFFLINE="1").stderr


def test_a_folder(call, hub, tmp_path, content):
    result = call("pull", "hf:org/folder")
    assert (result["tensors"], result["name"]) == (21, "org/folder")
    assert result["path"].startswith(str(tmp_path / "hf")) and COMMIT in result["path"]
    fetched = set(os.listdir(result["path"]))
    assert fetched == {name for name in content["org/folder"] if not name.endswith((".bin", ".py"))}
    assert call("list") == ["hf:org/folder"]
    assert call("remove", "hf:org/folder") > 100_000
    assert call("list") == []
    assert call("remove", "hf:org/folder")["error"] == "SourceError"


def test_offline_and_out_of_reach_use_the_cache(call, hub):
    first = call("pull", "hf:org/folder")
    asked = len(hub.requests)
    assert call("pull", "hf:org/folder", HF_HUB_OFFLINE="1") == first
    assert len(hub.requests) == asked
    assert call("pull", "hf:org/folder", HF_ENDPOINT="http://127.0.0.1:9") == first
    assert "HF_HUB_OFFLINE" in call("pull", "hf:org/one", HF_HUB_OFFLINE="1")["message"]
    assert "cannot be fetched" in call("pull", "hf:org/one", HF_ENDPOINT="http://127.0.0.1:9")["message"]


def test_one_file_by_name_or_part_of_it(call, tmp_path):
    for ref in ("hf:org/files:tiny-Q8_0.gguf", "hf:org/files:q8_0"):
        result = call("pull", ref)
        assert result["path"].endswith("tiny-Q8_0.gguf") and result["tensors"] == 21
    assert os.listdir(os.path.dirname(result["path"])) == ["tiny-Q8_0.gguf"]
    assert call("pull", "hf:org/files:q8_0", HF_HUB_OFFLINE="1") == result


def test_all_parts_of_a_split_file(call):
    result = call("pull", "hf:org/files:big/big-Q4_K_M-00001-of-00003.gguf")
    assert result["tensors"] == 21
    assert len(os.listdir(os.path.dirname(result["path"]))) == 3


def test_which_file(call):
    several = call("pull", "hf:org/files")
    assert several["error"] == "SourceError" and "tiny-Q8_0.gguf" in several["message"]
    assert "fits several" in call("pull", "hf:org/files:Q4_K_M")["message"]
    assert "no file 'Q2_K'" in call("pull", "hf:org/files:Q2_K")["message"]
    assert call("pull", "hf:org/one")["path"].endswith("only.gguf")
    assert "neither safetensors" in call("pull", "hf:org/empty")["message"]


def test_revisions(call):
    assert OLD in call("pull", "hf:org/one", "v1")["path"]
    assert COMMIT in call("pull", "hf:org/one", COMMIT)["path"]
    assert "no such revision" in call("pull", "hf:org/one", "v9")["message"]


def test_unknown_private_and_gated(call, hub):
    hub.private.add("org/one")
    hub.gated.add("org/files")
    assert "does not exist" in call("pull", "hf:org/absent")["message"]
    assert "HF_TOKEN" in call("pull", "hf:org/one")["message"]
    assert call("pull", "hf:org/one", HF_TOKEN=TOKEN)["tensors"] == 21
    assert "gated" in call("pull", "hf:org/files:q8_0")["message"]
    assert call("pull", "hf:org/files:q8_0", HF_TOKEN=TOKEN)["tensors"] == 21


def test_a_broken_download_is_tried_again(call, hub):
    """By the library, which resumes from whole chunks of 10 MB: this file has not even one."""
    hub.stop_after = 20_000
    assert call("pull", "hf:org/one")["tensors"] == 21
    gets = [path for method, path, _ in hub.requests if method == "GET" and path.endswith("only.gguf")]
    assert len(gets) == 2


@pytest.mark.parametrize("ref", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b:../x", "hf:a b/c", "hf:../b", "hf:a/b:"])
def test_references(ref):
    with pytest.raises(SourceError):
        sources.resolve(ref)
