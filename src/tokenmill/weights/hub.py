"""Models of the Hugging Face hub, through huggingface-hub and in its own cache: hf:org/name[:file].

Its settings are honoured as everywhere: HF_HOME, HF_TOKEN (or a saved login), HF_ENDPOINT, HF_HUB_OFFLINE; downloads
resume. Without `:file` a repository of safetensors is fetched with its configuration and tokenizer, one of GGUF files
needs the choice: a file's name, or a part of it that fits only one, such as Q4_K_M.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SourceError

TIMEOUT = 30.0  # seconds for the hub to answer
WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt")
_REF = re.compile(r"hf:([\w.-]+/[\w.-]+)(?::([^:]+))?", re.ASCII)
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


def parse(ref: str) -> tuple[str, str | None]:
    """(repository, file or part of its name)."""
    match = _REF.fullmatch(ref)
    if not match or (match[2] and ".." in match[2].split("/")):
        raise SourceError(f"{ref!r} is not of the form hf:org/name[:file]")
    return match[1], match[2]


def fetch(ref: str, revision: str | None = None) -> Path:
    """The local path of a GGUF file or of a folder. Raises SourceError: unknown, gated, unreachable, ambiguous."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    repo, wanted = parse(ref)
    with _hub_errors(ref):
        files, offline = _list_files(repo, revision)
    chosen = _choose(ref, files, wanted)
    with _hub_errors(ref):
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(WANTED) if chosen is None else [_parts_pattern(chosen)],
                local_files_only=offline,
            )
        )
    path = folder if chosen is None else folder / chosen
    if not path.exists():
        raise SourceError(f"{ref}: {chosen} did not arrive")
    return path


def _list_files(repo: str, revision: str | None) -> tuple[list[str], bool]:
    """(names of the repository's files, False); those in its cache and True where the hub is off or out of reach."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        if not constants.HF_HUB_OFFLINE:
            info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
            return [sibling.rfilename for sibling in info.siblings or ()], False
        unreachable = None
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise
    except Exception as e:  # the hub library has changed its HTTP client more than once
        unreachable = e
    try:
        found = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=[""], local_files_only=True)
    except errors.LocalEntryNotFoundError:
        if unreachable is not None:
            raise unreachable from None
        raise SourceError(f"hf:{repo} is not in the hub's cache, and HF_HUB_OFFLINE is set") from None
    folder = Path(found)
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()], True


def _choose(ref: str, files: list[str], wanted: str | None) -> str | None:
    """The one .gguf file to fetch (a split one's first part), or None for the folder of safetensors."""
    models = [f for f in files if f.endswith(".gguf") and not Path(f).name.startswith("mmproj")]
    models = [f for f in models if not (m := _SPLIT.fullmatch(f)) or f.endswith(f"-00001-of-{m[2]}.gguf")]
    if wanted is None:
        if any(f.endswith(".safetensors") for f in files) and "config.json" in files:
            return None
        found = models
    elif wanted in files:
        found = [wanted]
    else:
        found = [f for f in models if re.search(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", f, re.I)]
    if len(found) == 1:
        return found[0]
    if not models:
        raise SourceError(f"{ref} holds neither safetensors with a config.json nor .gguf files")
    problem = "fits several" if found else f"has no file {wanted!r}"
    raise SourceError(f"{ref} {problem}; write {ref.partition(':')[0]}:org/name:FILE with one of {', '.join(models)}")


def _parts_pattern(name: str) -> str:
    match = _SPLIT.fullmatch(name)
    pattern = re.sub(r"([*?\[])", r"[\1]", match[1] if match else name)
    return f"{pattern}-?????-of-{match[2]}.gguf" if match else pattern


@contextmanager
def _hub_errors(ref: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except SourceError:
        raise
    except errors.GatedRepoError:
        raise SourceError(f"{ref} is gated: accept its terms on the hub, then set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{ref} has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise SourceError(f"{ref} does not exist on the hub, or is private and HF_TOKEN does not open it") from None
    except Exception as e:  # HTTP, disk and validation errors of several libraries
        raise SourceError(f"{ref} cannot be fetched: {_first_line(e)}") from None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def cached() -> list[tuple[str, Path, int]]:
    """(reference, folder, bytes) of every model repository in the hub's cache."""
    from huggingface_hub import constants

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return []
    return sorted((f"hf:{repo.repo_id}", repo.repo_path, repo.size_on_disk) for repo in _scan().repos
                  if repo.repo_type == "model" and repo.size_on_disk)  # fmt: skip


def _scan():
    from huggingface_hub import scan_cache_dir

    return scan_cache_dir()


def remove(ref: str) -> int:
    """Delete a repository from the hub's cache; the bytes freed."""
    repo_id, _ = parse(ref)
    if cached():
        scan = _scan()
        revisions = [r.commit_hash for repo in scan.repos if repo.repo_id == repo_id and repo.repo_type == "model"
                     for r in repo.revisions]  # fmt: skip
        if revisions:
            strategy = scan.delete_revisions(*revisions)
            with _hub_errors(ref):
                strategy.execute()
            return strategy.expected_freed_size
    raise SourceError(f"{ref} is not in the hub's cache")
