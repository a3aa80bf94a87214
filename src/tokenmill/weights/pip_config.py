"""The few settings of pip that also matter here: index-url, extra-index-url, cert, proxy.

Read as pip reads them, without pip: PIP_<NAME> in the environment, else the last of pip's configuration files that
has it. https://pip.pypa.io/en/stable/topics/configuration/
"""

from __future__ import annotations

import configparser
import os
import sys
from functools import cache
from pathlib import Path

DEFAULT_INDEX = "https://pypi.org/simple"


def config_files() -> list[Path]:
    """Pip's configuration files, weakest first."""
    chosen = os.environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    home = Path.home()
    folders = os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    files = [Path(folder) / "pip" / "pip.conf" for folder in reversed(folders) if folder]
    files += [Path("/etc/pip.conf"), home / ".pip" / "pip.conf"]
    if sys.platform == "darwin":
        files.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    files.append(Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf")
    files.append(Path(sys.prefix) / "pip.conf")
    return [*files, Path(chosen)] if chosen else files


@cache
def _read(path: Path, changed_ns: int) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["global"]) if parser.has_section("global") else {}


def pip_setting(name: str) -> str | None:
    """`name` as in a configuration file: "index-url"."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    found = None
    for path in config_files():
        try:
            settings = _read(path, path.stat().st_mtime_ns)
        except OSError:
            continue
        found = settings.get(name) or settings.get(name.replace("-", "_")) or found
    return found


def index_urls() -> list[str]:
    """The package indexes to ask, the main one first, without a slash at the end."""
    urls = [pip_setting("index-url") or DEFAULT_INDEX, *(pip_setting("extra-index-url") or "").split()]
    return [url.rstrip("/") for url in urls]
