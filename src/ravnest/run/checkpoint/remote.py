"""Checkpoints elsewhere: copies of them behind a URL that fsspec knows (s3://, gs://, sftp://, ...), and back again.

    URL/step-000100/stage-0.safetensors ...
    URL/step-000100/manifest.json               written last: without it there is no checkpoint

The copy is made when the checkpoint is complete here, in the background. What is brought back is checked by digests,
like any checkpoint. fsspec comes with torch; what it needs for a kind of URL (s3fs, gcsfs, ...) one installs oneself.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from ravnest.errors import RavnestError

__all__ = ["bring", "is_url", "send"]

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{6,12}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")


def is_url(text: Path | str) -> bool:
    return _URL.fullmatch(str(text)) is not None


def send(checkpoint: Path, url: str, keep: int) -> None:
    """Copy a complete checkpoint, and remove the oldest beyond `keep`. Raises `RavnestError`."""
    files, root = _open(url)
    target = f"{root}/{checkpoint.name}"
    try:
        files.makedirs(target, exist_ok=True)
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != _MANIFEST)
        for name in (*names, _MANIFEST):
            files.put_file(str(checkpoint / name), f"{target}/{name}")
        for old in _steps(files, root)[:-keep]:
            files.rm(f"{root}/{old}", recursive=True)
    except Exception as error:  # each kind of URL has errors of its own
        raise RavnestError(f"{url}: {error or type(error).__name__}") from error


def bring(url: str, run: Path) -> Path:
    """Copy the newest checkpoint behind a URL into the folder of a run; the checkpoint's own. Raises `RavnestError`."""
    files, root = _open(url)
    try:
        complete = [step for step in _steps(files, root) if files.exists(f"{root}/{step}/{_MANIFEST}")]
        if not complete:
            raise RavnestError("there is no checkpoint")
        source, target = f"{root}/{complete[-1]}", run / "checkpoints" / complete[-1]
        draft = target.with_name(f".{target.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for path in files.ls(source, detail=False):
            name = str(path).rpartition("/")[2]
            if name == _MANIFEST or name.endswith(".safetensors"):
                files.get_file(path, str(draft / name))
        draft.replace(target)
    except Exception as error:  # each kind of URL has errors of its own
        raise RavnestError(f"{url}: {error or type(error).__name__}") from error
    return target


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise RavnestError(f"{url} cannot be opened: {error}") from error
    return files, str(root).rstrip("/")


def _steps(files: Any, root: str) -> list[str]:
    """Names of checkpoints, the oldest first."""
    names = [str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
    return sorted((name for name in names if _STEP.fullmatch(name)), key=lambda name: int(name.removeprefix("step-")))
