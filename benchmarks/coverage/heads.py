"""Inputs, labels and losses for the tasks of `transformers`' auto classes.

Each task has a few candidate inputs; the first that plain PyTorch accepts for an architecture is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.coverage.shrink import VOCABULARY

__all__ = ["TASKS", "Task", "Trial"]

_SAMPLES, _LENGTH = 3, 12
Batch = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """Inputs that a model may take, the labels it may compute its loss from, and a loss function over its output."""

    inputs: Batch
    labels: Batch
    loss: Callable[[Any, Any], Tensor]
    targets: Any


@dataclass(frozen=True)
class Task:
    """A task: the name of its auto class and of its mapping, and the trials for a configuration."""

    auto: str
    mapping: str
    trials: Callable[[Any, str], Iterator[Trial]]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY - 9, shape or (_SAMPLES, _LENGTH), generator=_generator())


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator())


def _classes(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape or (_SAMPLES,), generator=_generator())


def _token_loss(output: Any, targets: Tensor) -> Tensor:
    logits: Tensor = output.logits
    return F.cross_entropy(logits[:, -targets.shape[1] :].flatten(0, -2), targets.flatten())


def _class_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets)


def _span_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.start_logits, targets) + F.cross_entropy(output.end_logits, targets)


def _regression_loss(output: Any, targets: Tensor) -> Tensor:
    """The first tensor of the output that has gradients, against a number per sample."""
    values = [v for v in output.values() if isinstance(v, Tensor) and v.requires_grad and v.dim() > 1]
    return F.mse_loss(values[0].flatten(1).mean(1), targets)


def _text(config: Any, main: str) -> Iterator[Batch]:
    ids = _tokens()
    yield {"input_ids": ids}
    if isinstance(end := getattr(config, "eos_token_id", None), int):
        ids = ids.clone()
        ids[:, -1] = end
        yield {"input_ids": ids}


def _number(config: Any, *names: str, default: int) -> int:
    """A number of the configuration or of one nested in it."""
    parts = [config, *(v for k, v in vars(config).items() if k.endswith("_config"))]
    for name, part in itertools.product(names, parts):
        value = getattr(part, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return default


def _images(config: Any, main: str) -> Iterator[Batch]:
    channels = _number(config, "num_channels", "in_channels", default=3)
    for size in dict.fromkeys((_number(config, "image_size", "img_size", default=32), 32, 64, 96, 224)):
        yield {"pixel_values": _noise(_SAMPLES, channels, size, size)}


def _videos(config: Any, main: str) -> Iterator[Batch]:
    frames, channels = _number(config, "num_frames", "frames_per_clip", default=4), 3
    for size in dict.fromkeys((_number(config, "image_size", "crop_size", default=32), 32, 64)):
        yield {main: _noise(_SAMPLES, frames, channels, size, size)}


def _sounds(config: Any, main: str) -> Iterator[Batch]:
    bins = _number(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", default=16)
    steps = 2 * _number(config, "max_source_positions", default=32)
    length = _number(config, "max_length", default=64)
    yield {"input_values": _noise(_SAMPLES, 4000)}
    for shape in ((bins, steps), (steps, bins), (length, bins), (64, bins), (64, 160), (160, bins)):
        yield {main: _noise(_SAMPLES, *shape)}


def _images_and_text(config: Any, main: str) -> Iterator[Batch]:
    """Images with as many image tokens as the model may want; then text alone, which such models take as well."""
    token = _number(config, "image_token_id", "image_token_index", default=-1)
    patch = _number(config, "patch_size", default=8)
    for images in _images(config, main):
        side = images["pixel_values"].shape[-1] // patch
        for count in dict.fromkeys((side * side, side * side + 1, (side // 2) ** 2, 8, 0)):
            ids = _tokens(_SAMPLES, count + _LENGTH)
            if token >= 0 and count:
                ids[:, 1 : count + 1] = token
            yield {"input_ids": ids, **images}
    yield {"input_ids": _tokens()}


def _token_task(inputs: Callable[[Any, str], Iterator[Batch]]) -> Callable[[Any, str], Iterator[Trial]]:
    def trials(config: Any, main: str) -> Iterator[Trial]:
        for batch in inputs(config, main):
            labels = batch.get("input_ids", _tokens())
            yield Trial(batch, {"labels": labels}, _token_loss, labels)

    return trials


def _decoder_task(inputs: Callable[[Any, str], Iterator[Batch]]) -> Callable[[Any, str], Iterator[Trial]]:
    """An encoder and a decoder: a loss function needs the decoder's inputs in the batch."""

    def trials(config: Any, main: str) -> Iterator[Trial]:
        for batch in inputs(config, main):
            yield Trial(batch, {"labels": _tokens()}, _token_loss, _tokens())

    return trials


def _class_task(inputs: Callable[[Any, str], Iterator[Batch]], *shape: int) -> Callable[[Any, str], Iterator[Trial]]:
    def trials(config: Any, main: str) -> Iterator[Trial]:
        for batch in inputs(config, main):
            labels = _classes(_SAMPLES, *shape)
            loss = _token_loss if shape else _class_loss
            yield Trial(batch, {"labels": labels}, loss, labels)

    return trials


def _spans(config: Any, main: str) -> Iterator[Trial]:
    where = {"start_positions": _classes(), "end_positions": _classes() + 2}
    yield Trial({"input_ids": _tokens()}, where, _span_loss, _classes())


def _choices(config: Any, main: str) -> Iterator[Trial]:
    yield Trial({"input_ids": _tokens(_SAMPLES, 2, _LENGTH)}, {"labels": _classes()}, _class_loss, _classes())


def _pixels(config: Any, main: str) -> Iterator[Trial]:
    for batch in _images(config, main):
        size = batch["pixel_values"].shape[-1]
        yield Trial(batch, {"labels": _classes(_SAMPLES, size, size)}, _regression_loss, _noise(_SAMPLES))


def _masked_images(config: Any, main: str) -> Iterator[Trial]:
    for batch in _images(config, main):
        side = batch["pixel_values"].shape[-1] // _number(config, "patch_size", default=8)
        masked = _classes(_SAMPLES, side * side).bool()
        labels = {"bool_masked_pos": masked}
        yield Trial(batch, labels, _regression_loss, _noise(_SAMPLES))


def _outputs(inputs: Callable[[Any, str], Iterator[Batch]]) -> Callable[[Any, str], Iterator[Trial]]:
    """Models without a loss of their own, with a loss function."""

    def trials(config: Any, main: str) -> Iterator[Trial]:
        for batch in inputs(config, main):
            yield Trial(batch, {}, _regression_loss, _noise(_SAMPLES))

    return trials


def _pairs(config: Any, main: str) -> Iterator[Trial]:
    for batch in _images(config, main):
        both = {"input_ids": _tokens(), **batch}
        yield Trial(both, {"return_loss": True}, _regression_loss, _noise(_SAMPLES))


def _transcripts(config: Any, main: str) -> Iterator[Trial]:
    for batch in _sounds(config, main):
        yield Trial(batch, {"labels": _tokens(_SAMPLES, 4)}, _regression_loss, _noise(_SAMPLES))


def _vectors(config: Any, main: str) -> Iterator[Trial]:
    for batch in _sounds(config, main):
        yield Trial(batch, {"labels": _classes()}, _regression_loss, _noise(_SAMPLES))


TASKS: dict[str, Task] = {
    "causal": Task("AutoModelForCausalLM", "CAUSAL_LM", _token_task(_text)),
    "masked": Task("AutoModelForMaskedLM", "MASKED_LM", _token_task(_text)),
    "sequence to sequence": Task("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", _decoder_task(_text)),
    "sequence classification": Task(
        "AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", _class_task(_text)),
    "token classification": Task(
        "AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", _class_task(_text, _LENGTH)),
    "question answering": Task("AutoModelForQuestionAnswering", "QUESTION_ANSWERING", _spans),
    "multiple choice": Task("AutoModelForMultipleChoice", "MULTIPLE_CHOICE", _choices),
    "next sentence": Task("AutoModelForNextSentencePrediction", "NEXT_SENTENCE_PREDICTION", _class_task(_text)),
    "image classification": Task("AutoModelForImageClassification", "IMAGE_CLASSIFICATION", _class_task(_images)),
    "masked image": Task("AutoModelForMaskedImageModeling", "MASKED_IMAGE_MODELING", _masked_images),
    "segmentation": Task("AutoModelForSemanticSegmentation", "SEMANTIC_SEGMENTATION", _pixels),
    "depth": Task("AutoModelForDepthEstimation", "DEPTH_ESTIMATION", _outputs(_images)),
    "detection": Task("AutoModelForObjectDetection", "OBJECT_DETECTION", _outputs(_images)),
    "video classification": Task("AutoModelForVideoClassification", "VIDEO_CLASSIFICATION", _class_task(_videos)),
    "audio classification": Task("AutoModelForAudioClassification", "AUDIO_CLASSIFICATION", _class_task(_sounds)),
    "audio frames": Task("AutoModelForAudioFrameClassification", "AUDIO_FRAME_CLASSIFICATION", _outputs(_sounds)),
    "audio vectors": Task("AutoModelForAudioXVector", "AUDIO_XVECTOR", _vectors),
    "speech recognition": Task("AutoModelForCTC", "CTC", _transcripts),
    "speech to text": Task("AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", _decoder_task(_sounds)),
    "image and text to text": Task(
        "AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT", _token_task(_images_and_text)),
    "images and texts": Task("AutoModelForZeroShotImageClassification", "ZERO_SHOT_IMAGE_CLASSIFICATION", _pairs),
}  # fmt: skip
