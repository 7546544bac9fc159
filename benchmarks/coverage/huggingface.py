"""Architectures of `transformers`, each with its default configuration made small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.case import Case, NotTried, Subject, run_plain
from benchmarks.coverage.heads import TASKS, Task, Trial
from benchmarks.coverage.shrink import small_configs

__all__ = ["architectures"]

_MAX_PARAMETERS = 60_000_000
_SEARCH_S = 60  # for a configuration that works


def architectures(group: str) -> Iterator[Subject]:
    """Every architecture of an auto class."""
    from transformers.models.auto import modeling_auto

    task = TASKS[group]
    for kind in getattr(modeling_auto, f"MODEL_FOR_{task.mapping}_MAPPING_NAMES"):
        yield Subject(kind, group, partial(_cases, kind, group, task))


def _cases(kind: str, group: str, task: Task) -> list[Case]:
    """The model with labels and with a loss function, in both forms; of other groups than `causal` one form each."""
    import transformers

    auto: Any = getattr(transformers, task.auto)
    config = transformers.AutoConfig.for_model(kind)
    labelled, trial = _first_that_trains(kind, group, auto, small_configs(config), task)
    both = _with_loss_function(labelled, trial, config)
    if group == "causal":
        return both if trial.labels else both[1:]
    if not trial.labels:
        return [both[1]]
    return [replace(case, forms=(form,)) for case, form in zip(both, ("instance", "builder"), strict=True)]


def _first_that_trains(kind: str, group: str, auto: Any, configs: Iterator[Any], task: Task) -> tuple[Case, Trial]:
    """The first configuration and inputs that plain PyTorch trains."""
    reasons: list[str] = []
    end = time.monotonic() + _SEARCH_S
    for config in configs:
        if time.monotonic() > end:
            break
        build = partial(auto.from_config, config)
        try:
            main = _main_input(build)
        except Exception as error:  # this configuration does not work in plain PyTorch: try the next
            reasons.append(_short(error))
            continue
        for trial in task.trials(config, main):
            case = Case(kind, group, build, None, partial(dict, {**trial.inputs, **trial.labels}))
            if not trial.labels:
                case = Case(kind, group, build, trial.loss, partial(_pair, trial))
            try:
                run_plain(case)
                return case, trial
            except Exception as error:  # these inputs do not work in plain PyTorch: try the next
                reasons.append(_short(error))
    raise NotTried(" | ".join(dict.fromkeys(reasons)) or "no small configuration is valid")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:120]


def _main_input(build: Callable[[], nn.Module]) -> str:
    """The name of the model's first input; `NotTried` if the model is too large."""
    with torch.device("meta"):
        model: Any = build()
    if (count := sum(p.numel() for p in model.parameters())) > _MAX_PARAMETERS:
        raise NotTried(f"{count / 1e6:.0f}M parameters")
    return str(model.main_input_name)


def _pair(trial: Trial) -> tuple[Any, Any]:
    return dict(trial.inputs), trial.targets


def _with_loss_function(labelled: Case, trial: Trial, config: Any) -> list[Case]:
    if labelled.loss is not None:
        return [labelled, labelled]
    inputs = dict(trial.inputs)
    if getattr(config, "is_encoder_decoder", False) and "labels" in trial.labels:
        inputs["decoder_input_ids"] = trial.targets
    functional = replace(labelled, loss=trial.loss, batch=partial(_pair, replace(trial, inputs=inputs)))
    try:
        run_plain(functional)
    except Exception:  # its output is not what the loss function takes
        return [labelled, labelled]
    return [labelled, functional]
