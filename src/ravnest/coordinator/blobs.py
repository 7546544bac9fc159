"""Files that nodes fetch by digest: stage files in memory, weights on disk, with reference counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from ravnest.protocol.control import Blob

__all__ = ["Blobs"]


class Blobs:
    """A blob is kept until it has been dropped as often as it was put."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes | Path] = {}
        self._uses: Counter[str] = Counter()

    def put(self, content: bytes | Path) -> Blob:
        digest, num_bytes = _digest(content)
        self._contents[digest] = content
        self._uses[digest] += 1
        return Blob(digest, num_bytes)

    def drop(self, blob: Blob) -> None:
        self._uses[blob.digest] -= 1
        if self._uses[blob.digest] <= 0:
            del self._uses[blob.digest]
            self._contents.pop(blob.digest, None)

    def get(self, digest: str) -> bytes | Path | None:
        return self._contents.get(digest)


def _digest(content: bytes | Path) -> tuple[str, int]:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return digest.hexdigest(), file.tell()
