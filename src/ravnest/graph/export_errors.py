"""Explains why a model cannot be exported: the line that is the cause, and what to change."""

from __future__ import annotations

import re
import traceback

from ravnest.errors import FixedBatchSize, TraceError

__all__ = ["IN_TORCH", "another_configuration", "explained"]

_LIBRARY = re.compile(r"(?:site|dist)-packages/(\w+)/")
IN_TORCH = re.compile(r"(?:site|dist)-packages/torch/")


def explained(error: Exception) -> TraceError:
    """The error of a model that torch.export cannot export."""
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
        return TraceError(
            f"the model's control flow or a shape depends on the values of its tensors, {where}\n"
            + (
                another_configuration(where)
                or "Use torch.where, masks or a fixed size instead, and tensors without .item(), float() or int()."
            )
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
