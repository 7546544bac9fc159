"""Text that exists on every machine: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Bytes", "batches", "decode", "library_text"]


def library_text(limit_bytes: int = 2_000_000) -> Tensor:
    """Return the first `limit_bytes` bytes of the standard library's modules, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).long()


def batches(text: Tensor, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows of `text` without end: (bytes, the bytes that follow them)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (size, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]
        yield windows[:, :-1], windows[:, 1:]


def decode(ids: Tensor) -> str:
    return Bytes().decode(ids.tolist())


class Bytes:
    """A tokenizer whose tokens are the bytes of a text in UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")
