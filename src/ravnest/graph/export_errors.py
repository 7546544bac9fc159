"""Explains why a model cannot be exported: the line that is the cause, and what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ravnest.errors import FixedBatchSize, TraceError

__all__ = ["IN_TORCH", "LayerSkip", "another_configuration", "explained"]

_LIBRARY = re.compile(r"(?:site|dist)-packages/(\w+)/")
_PACKED = "it packs sequences; give the padded ones to the recurrent layer, and choose the last positions by gather"
IN_TORCH = re.compile(r"(?:site|dist)-packages/torch/")


_ADVICE = {  # part of torch's message -> what the model does, and what to do instead
    "found a fake tensor in the exported program constant's list": (
        "it calls autograd in its forward pass or its loss (torch.autograd.grad, backward), or keeps a tensor of one "
        "forward pass for the next; write the derivative out with tensor operations, and keep state in buffers"
    ),
    "attempted to apply meta conversion to view functorch": (
        "it uses a transform of torch.func; write the derivative out with tensor operations"
    ),
    "from fake tensor input": (
        "it writes to a tensor that is no buffer, or keeps a tensor of one forward pass for the next; give such "
        "tensors to register_buffer"
    ),
    ".numpy() is not supported": "it reads the values of a tensor with NumPy; use the operations of torch",
    "_nested_tensor": "it uses nested tensors; pad them to one length, with a mask",
    "_pack_padded_sequence": _PACKED,
    "_sparse": "it uses sparse tensors; use dense ones, or index_add and gather with lists of positions",
}


@dataclass(frozen=True)
class LayerSkip:
    """A comparison of a random number with a probability, in the function where it is made."""

    place: str
    probability: float
    advice: str

    @staticmethod
    def found(frame: FrameType, probability: float) -> LayerSkip:
        """Describe the comparison that a function of the model makes."""
        owner = frame.f_locals.get("self")
        config = getattr(owner, "config", None)
        setting = _setting(config, probability)
        if setting:
            advice = f"set config.{setting} = 0.0"
        elif setting := _setting(owner, probability):
            advice = f"set {setting} = 0.0 in the {type(owner).__name__} of the model"
        else:
            advice = "set this probability to 0"
        return LayerSkip(f" in {frame.f_code.co_name}: ", probability, advice)


def _setting(owner: Any, value: float) -> str:
    """The attribute of a model or its configuration that is such a probability."""
    names = [name for name, given in vars(owner).items() if given == value] if hasattr(owner, "__dict__") else []
    return next((name for name in names if "drop" in name and "layer" in name), "")


def explained(error: Exception, skips: Sequence[LayerSkip] = ()) -> TraceError:
    """The error of a model that torch.export cannot export. `skips` are its comparisons of a random number."""
    text = str(error).strip() or type(error).__name__
    first = text.split("\n\n")[0][:600]
    if "Constraints violated" in text and ".size()" in text.partition("!")[0]:  # a dimension without a name
        return TraceError(
            f"the model fixes the length of its inputs: {first}\n"
            "Pad all batches to one length in the collator, with an attention mask if the model takes one, and leave "
            "out max_length."
        )
    if "Constraints violated" in text or "ConstraintViolation" in type(error).__name__:
        return FixedBatchSize(
            f"the model fixes the batch size: {first}\n"
            "Use x.shape[0] or -1 instead of the number. If a batch must not be split, because its tensors index each "
            "other or the loss compares its samples, train with microbatches_per_step=1."
        )
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__ or "GuardOnData" in text:
        where = _raised_at(error) or first
        if skip := next((skip for skip in reversed(skips) if skip.place in where), None):
            return TraceError(
                f"the model skips layers at random, with a probability of {skip.probability:g}, {where}\n"
                f"Which layers a program has cannot depend on random numbers: {skip.advice}."
            )
        return TraceError(
            f"the model's control flow or a shape depends on the values of its tensors, {where}\n"
            + (
                another_configuration(where)
                or "Use torch.where, masks or a fixed size instead, and tensors without .item(), float() or int(). "
                "Compute a mask that selects from several tensors once."
            )
        )
    if any(frame.filename.endswith("torch/nn/modules/rnn.py") for frame in traceback.extract_tb(error.__traceback__)):
        text += "_pack_padded_sequence"
    for part, advice in _ADVICE.items():
        if part in text:
            where = _raised_at(error)
            return TraceError(
                f"the model cannot be traced{', ' * bool(where)}{where}\n{advice[0].upper()}{advice[1:]}."
            )
    return TraceError(f"the model cannot be traced: {type(error).__name__}: {first}")


def _raised_at(error: Exception) -> str:
    """The innermost line of the model that raised the error, or of the library that the model is from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not IN_TORCH.search(f.filename) and not f.filename.startswith("<")]
    own = [f for f in own if "ravnest/graph/" not in f.filename or f.filename.endswith("tracer.py")]
    if not own:
        return ""
    last = own[-1]
    if last.filename.endswith("ravnest/graph/tracer.py"):  # torch raised it, and no line of the user's own is between
        return f"in an operation of torch that the {'loss' if 'self.loss(' in (last.line or '') else 'model'} calls"
    return f"at {last.filename}:{last.lineno} in {last.name}: {last.line}"


def another_configuration(source: str) -> str:
    """Advice for a line in a library, which a user cannot rewrite; empty for a line of the user's own."""
    library = _LIBRARY.search(source)
    if library is None:
        return ""
    example = ' (such as attn_implementation="eager", or layerdrop=0)' if library[1] == "transformers" else ""
    return f"{library[1]} is a library: choose another configuration of the model that does not need it{example}"
