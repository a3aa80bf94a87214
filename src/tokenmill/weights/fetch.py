"""Downloads a URL into a file: resumed where it stopped, digest checked, renamed into place only when whole.

Plain urllib: proxies from the environment, certificates from SSL_CERT_FILE, SSL_CERT_DIR or pip's `cert`. It does not
know what it downloads.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from ..errors import SourceError
from .pip_config import pip_setting
from .store import Progress, disk_errors

CHUNK = 1 << 18
ATTEMPTS = 5
TIMEOUT = 60.0  # seconds without a byte


def _context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in (pip_setting("cert"), os.environ.get("REQUESTS_CA_BUNDLE")):
        if certificate and os.path.exists(certificate):
            folder = os.path.isdir(certificate)
            context.load_verify_locations(None if folder else certificate, certificate if folder else None)
    return context


def open_url(url: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    """The response to a GET; user:password in the URL becomes a header. Raises urllib's errors."""
    parts = urllib.parse.urlsplit(url)
    headers = {"User-Agent": "tokenmill", **(headers or {})}
    if parts.username:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    handlers: list[urllib.request.BaseHandler] = []
    if parts.scheme == "https":
        handlers.append(urllib.request.HTTPSHandler(context=_context()))
    if proxy := pip_setting("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    request = urllib.request.Request(urllib.parse.urlunsplit(parts), headers=headers)
    return urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT)


def download(url: str, target: Path, *, sha256: str | None, size: int | None, progress: Progress | None = None) -> None:
    """Fetch `url` to `target`. A `target.part` left by an earlier try is continued, but only under a known digest.

    Raises SourceError: unreachable, refused, cut short after several tries, or bytes that are not the promised ones.
    """
    part = target.with_name(target.name + ".part")
    if sha256 is None:
        part.unlink(missing_ok=True)
    label = target.name
    for attempt in range(ATTEMPTS):
        have = part.stat().st_size if part.exists() else 0
        try:
            _append(url, part, have, size, label, progress)
        except (urllib.error.HTTPError, ssl.SSLError) as e:
            if isinstance(e, urllib.error.HTTPError) and e.code == 416:
                part.unlink(missing_ok=True)  # the remainder of another file
                continue
            if isinstance(e, urllib.error.HTTPError) and e.code >= 500 and attempt + 1 < ATTEMPTS:
                time.sleep(min(2**attempt, 8))
                continue
            raise SourceError(f"{_public(url)} cannot be fetched: {e}") from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
            if attempt + 1 == ATTEMPTS:
                raise SourceError(
                    f"{_public(url)} cannot be fetched: {getattr(e, 'reason', None) or e!r}; "
                    "what has arrived is kept and continued next time"
                ) from None
            time.sleep(min(2**attempt, 8))
            continue
        if sha256 is not None and file_sha256(part) != sha256:
            part.unlink()
            if have:
                continue  # the kept piece was not of this file: once more from the start
            raise SourceError(f"{_public(url)} gave bytes whose SHA-256 is not {sha256}; nothing of it is kept")
        with disk_errors(target.parent):
            os.replace(part, target)
        return
    raise SourceError(f"{_public(url)} cannot be fetched: tried {ATTEMPTS} times")


def _append(url: str, part: Path, have: int, size: int | None, label: str, progress: Progress | None) -> None:
    if size is not None and have == size:
        return
    with open_url(url, {"Range": f"bytes={have}-"} if have else {}) as response:
        if response.status != 206:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else size
        with disk_errors(part.parent), open(part, "r+b" if have else "wb") as f:
            f.seek(have)
            while chunk := response.read(CHUNK):
                f.write(chunk)
                have += len(chunk)
                if progress:
                    progress(label, have, total)
        if total is not None and have < total:
            raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _public(url: str) -> str:
    """The URL without its password."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
