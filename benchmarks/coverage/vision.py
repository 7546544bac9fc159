"""Vision models: a model of every family of `timm`, and those of `torchvision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.case import Case, NotTried, Subject, run_plain

__all__ = ["timm_families", "torchvision_models"]

_SAMPLES, _CLASSES = 2, 4
_MAX_PARAMETERS = 60_000_000
_SMALL_WORDS = ("test_", "atto", "femto", "pico", "nano", "xxs", "xx_small", "xs", "tiny", "_t", "small", "_s", "18")
_SIZES = (64, 96, 128, 224, 256)


def _batch(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_SAMPLES, *shape, generator=generator)
    return images, torch.randint(0, _CLASSES, (_SAMPLES,), generator=generator)


def _loss(output: Any, targets: Tensor) -> Tensor:
    """Cross entropy of the class scores; of scores for each pixel their mean, of several outputs the sum."""
    outputs = list(output.values()) if isinstance(output, dict) else output
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    losses = [F.cross_entropy(o.flatten(2).mean(-1) if o.dim() > 2 else o, targets) for o in outputs]
    return torch.stack(losses).sum()


def _too_large(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in build().parameters())
    if count > _MAX_PARAMETERS:
        raise NotTried(f"{count / 1e6:.0f}M parameters")


def _first_that_trains(candidates: Iterator[Case]) -> list[Case]:
    reasons: list[str] = []
    for case in candidates:
        try:
            _too_large(case.build)
            run_plain(case)
            return [case]
        except Exception as error:  # this model or size does not work in plain PyTorch: try the next
            reasons.append(f"{type(error).__name__}: {error}".split("\n")[0][:120])
    raise NotTried(" | ".join(dict.fromkeys(reasons)))


def timm_families() -> Iterator[Subject]:
    """A small model of every module of `timm.models`, with small images."""
    timm: Any = import_module("timm")
    for module in timm.list_modules():
        if names := timm.list_models(module=module):
            yield Subject(module, "timm", partial(_timm_cases, module, names))


def _timm_cases(module: str, names: list[str]) -> list[Case]:
    return _first_that_trains(_timm_candidates(module, names))


def _timm_candidates(module: str, names: list[str]) -> Iterator[Case]:
    timm: Any = import_module("timm")
    for name in sorted(names, key=lambda name: next((i for i, w in enumerate(_SMALL_WORDS) if w in name), 99))[:3]:
        for size in _SIZES:
            for options in ({"img_size": size}, {}):
                build = partial(timm.create_model, name, num_classes=_CLASSES, **options)
                yield Case(module, "timm", build, _loss, partial(_batch, 3, size, size))


def torchvision_models() -> Iterator[Subject]:
    """The classification, segmentation and video models of `torchvision`."""
    from torchvision import models

    for kind in ("classification", "segmentation", "video"):
        source = models if kind == "classification" else getattr(models, kind)
        for name in models.list_models(module=source):
            yield Subject(name, "torchvision", partial(_torchvision_cases, name, kind))


def _torchvision_cases(name: str, kind: str) -> list[Case]:
    return _first_that_trains(_torchvision_candidates(name, kind))


def _torchvision_candidates(name: str, kind: str) -> Iterator[Case]:
    from torchvision import models

    for size in _SIZES:
        shapes = [(3, size, size)] if kind != "video" else [(3, 8, size, size), (3, 16, size, size)]
        for shape in shapes:
            for options in ({"image_size": size}, {}) if name.startswith("vit") else ({},):
                build = partial(models.get_model, name, weights=None, num_classes=_CLASSES, **options)
                yield Case(name, "torchvision", build, _loss, partial(_batch, *shape))
