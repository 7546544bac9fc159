"""The allow-list of operations in a stage, and the reason for each family.

Everything here computes new tensors from its arguments and nothing else: no files, no storage, no other
devices, no uninitialised memory, no sizes that depend on data, no custom namespaces, no private operations.
Any other operation is rejected. To propose one, add it to the family whose reason covers it (CONTRIBUTING.md lists
the checks of the tests).

Numbers that depend on the batch are computed by `sym.*`: plain arithmetic on bounded integers and floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = [
    "ALLOWED",
    "FAMILIES",
    "INIT_ALLOWED",
    "LITERAL",
    "LITERAL_LIMIT",
    "SYM",
    "TRUNC_NORMAL",
    "Family",
    "is_random",
    "may_share_memory",
    "needs_device",
    "resolve",
    "schema_of",
    "eval_arguments",
    "writes_statistics",
]


class Family(NamedTuple):
    reason: str
    ops: str
    cheap: bool = False  # recomputing it costs less than sending its result


FAMILIES: dict[str, Family] = {
    "views": Family(
        "Views of the same elements; torch checks sizes against the tensor.",
        """alias.default broadcast_tensors.default chunk.default contiguous.default detach.default
        diagonal.default expand.default expand_as.default flatten.using_ints movedim.int movedim.intlist
        narrow.default permute.default reshape.default reshape_as.default select.int slice.Tensor
        split.Tensor split.sizes split_with_sizes.default squeeze.default squeeze.dim squeeze.dims
        swapaxes.default t.default transpose.int type_as.default unbind.int unflatten.int unsqueeze.default
        view.default view.dtype view_as.default""",
        cheap=True,
    ),
    "conversions": Family(
        "A copy in another dtype or memory format, always on the interpreter's device.",
        "clone.default lift_fresh_copy.default to.device to.dtype to.dtype_layout to.other",
        cheap=True,
    ),
    "creation": Family(
        "Tensors from constants. Their size is checked before memory is allocated; none are uninitialised.",
        """arange.default arange.start arange.start_step eye.default eye.m full.default full_like.default
        linspace.default new_full.default new_ones.default new_zeros.default ones.default ones_like.default
        scalar_tensor.default zeros.default zeros_like.default""",
        cheap=True,
    ),
    "joining": Family(
        "Elements of several tensors, or repeats of one, joined in a new tensor.",
        """cat.default hstack.default vstack.default stack.default repeat.default tile.default
        repeat_interleave.self_int roll.default flip.default constant_pad_nd.default pad.default tril.default
        triu.default meshgrid.default meshgrid.indexing broadcast_to.default""",
        cheap=True,
    ),
    "arithmetic": Family(
        "Elementwise arithmetic.",
        """abs.default add.Scalar add.Tensor addcdiv.default addcmul.default ceil.default clamp.Tensor
        clamp.default clamp_max.default clamp_min.default cos.default cosh.default cumsum.default
        deg2rad.default div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode erf.default erfc.default
        erfinv.default exp.default exp2.default expm1.default floor.default floor_divide.default
        floor_divide.Scalar fmod.Scalar fmod.Tensor frac.default hypot.default lerp.Scalar lerp.Tensor
        lgamma.default log.default log10.default log1p.default log2.default logaddexp.default
        maximum.default minimum.default max.other min.other mul.Scalar mul.Tensor nan_to_num.default
        neg.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default remainder.Scalar
        remainder.Tensor round.default rsqrt.default rsub.Scalar rsub.Tensor sgn.default sigmoid.default
        sign.default sin.default sinc.default sinh.default sqrt.default square.default sub.Scalar sub.Tensor
        tan.default tanh.default asin.default acos.default atan.default atan2.default true_divide.Tensor
        trunc.default xlogy.Tensor""",
        cheap=True,
    ),
    "logic": Family(
        "Comparisons and bitwise operations, as used for masks.",
        """all.default all.dim any.default any.dim bitwise_and.Scalar bitwise_and.Tensor bitwise_not.default
        bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Tensor eq.Scalar eq.Tensor ge.Scalar ge.Tensor
        gt.Scalar gt.Tensor isfinite.default isinf.default isnan.default le.Scalar le.Tensor
        logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor
        masked_fill.Scalar masked_fill.Tensor ne.Scalar ne.Tensor where.self where.Scalar where.ScalarOther
        where.ScalarSelf""",
        cheap=True,
    ),
    "indexing": Family(
        "Elements read or written by index; torch rejects an index out of range.",
        """embedding.default gather.default index.Tensor index_add.default index_copy.default
        index_put.default index_select.default one_hot.default scatter.src scatter.value scatter_add.default
        select_scatter.default slice_scatter.default take_along_dim.default masked_scatter.default""",
    ),
    "reductions": Family(
        "Sums, means, extremes, norms and sorts over whole dimensions.",
        """amax.default amin.default argmax.default argmin.default argsort.default cummax.default
        cumprod.default linalg_norm.default linalg_vector_norm.default logsumexp.default max.default max.dim
        mean.default mean.dim median.dim min.default min.dim norm.ScalarOpt_dim norm.Scalar prod.default
        prod.dim_int sort.default std.correction std.default std.dim sum.default sum.dim_IntList topk.default
        var.correction var.default var.dim var_mean.correction""",
    ),
    "products": Family(
        "Matrix products and attention, most of the computation.",
        """addbmm.default addmm.default baddbmm.default bilinear.default bmm.default dot.default
        einsum.default linear.default matmul.default mm.default mv.default outer.default
        scaled_dot_product_attention.default tensordot.default cdist.default""",
    ),
    "convolutions": Family(
        "Convolutions, pooling and resampling of images, sequences and volumes.",
        """adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
        adaptive_max_pool2d.default avg_pool1d.default avg_pool2d.default avg_pool3d.default conv1d.default
        conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
        conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input max_pool1d.default
        max_pool2d.default max_pool2d_with_indices.default max_pool3d.default pixel_shuffle.default
        pixel_unshuffle.default upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec
        upsample_nearest1d.vec upsample_nearest2d.vec im2col.default col2im.default""",
    ),
    "activations": Family(
        "The non-linearities between layers.",
        """celu.default elu.default gelu.default glu.default hardsigmoid.default hardswish.default
        hardtanh.default leaky_relu.default log_sigmoid.default log_softmax.int mish.default prelu.default
        relu.default relu6.default rrelu.default selu.default silu.default softmax.int softplus.default
        softshrink.default threshold.default""",
    ),
    "normalisation": Family(
        "Normalisation layers; batch and instance norm write only their own running statistics.",
        """batch_norm.default group_norm.default instance_norm.default layer_norm.default rms_norm.default
        cosine_similarity.default""",
    ),
    "randomness": Family(
        "Random numbers from the interpreter's own generator.",
        """alpha_dropout.default bernoulli.default bernoulli.p dropout.default feature_dropout.default
        rand.default rand_like.default randint.default randint.low randn.default randn_like.default
        normal_functional.default""",
    ),
    "losses": Family(
        "Loss functions that torch implements as one operation.",
        """binary_cross_entropy.default binary_cross_entropy_with_logits.default cosine_embedding_loss.default
        cross_entropy_loss.default hinge_embedding_loss.default huber_loss.default kl_div.default
        l1_loss.default margin_ranking_loss.default mse_loss.default nll_loss.default nll_loss2d.default
        nll_loss_nd.default poisson_nll_loss.default smooth_l1_loss.default soft_margin_loss.default
        triplet_margin_loss.default""",
    ),
    "recurrence": Family(
        "Whole recurrent layers; their weights are ordinary parameters.",
        "gru.input gru_cell.default lstm.input lstm_cell.default rnn_relu.input rnn_tanh.input",
    ),
    "writes": Family(
        "In-place forms, kept where the model writes into a view of a tensor or into its own buffer.",
        """add_.Scalar add_.Tensor clamp_.default copy_.default div_.Scalar div_.Tensor fill_.Scalar
        fill_.Tensor index_put_.default lerp_.Scalar lerp_.Tensor masked_fill_.Scalar masked_fill_.Tensor
        mul_.Scalar mul_.Tensor sub_.Scalar sub_.Tensor zero_.default""",
    ),
}

# Allowed only in init lists: fills and random fills of parameters and buffers, and in-place arithmetic on them.
_INIT_ONLY = """abs_.default add_.Scalar add_.Tensor bernoulli_.float clamp_.default clamp_max_.default
    clamp_min_.default copy_.default diag.default div_.Scalar div_.Tensor erfinv_.default exp_.default
    exponential_.default fill_.Scalar fill_.Tensor fill_diagonal_.default log_.default mul_.Scalar mul_.Tensor
    neg_.default normal_.default pow_.Scalar random_.default random_.from random_.to reciprocal_.default
    sqrt_.default sub_.Scalar sub_.Tensor tril_.default triu_.default trunc_.default uniform_.default
    zero_.default linalg_qr.default randperm.default normal.float_float diagonal_copy.default"""

ALLOWED: dict[str, str] = {f"aten.{op}": family for family, entry in FAMILIES.items() for op in entry.ops.split()}
_INIT_FAMILIES = ("views", "conversions", "creation", "joining", "arithmetic", "logic", "indexing", "reductions",
                  "products", "randomness")  # fmt: skip
INIT_ALLOWED: dict[str, str] = {
    **{op: family for op, family in ALLOWED.items() if family in _INIT_FAMILIES},
    **{f"aten.{op}": "initialisation" for op in _INIT_ONLY.split()},
}

LITERAL = "ravnest.literal"  # a small tensor literal in a builder: (numbers, dtype, shape)
LITERAL_LIMIT = 1 << 16
TRUNC_NORMAL = "ravnest.trunc_normal_"  # (tensor, mean, std, a, b): redraws until all values lie between a and b
_BOUND = 2**63 - 1


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic limited to 64-bit results, so that no chain of products can grow without bound."""

    def call(*numbers: Any) -> Any:
        result = function(*numbers)
        if not isinstance(result, bool | int | float) or not -_BOUND <= result <= _BOUND:
            raise OverflowError(f"{result!r:.40} is out of range")
        return result

    return call


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "truediv": operator.truediv, "mod": operator.mod, "neg": operator.neg, "eq": operator.eq,
    "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "max": max, "min": min, "float": float, "int": int, "sqrt": math.sqrt, "ceil": math.ceil,
    "floor": math.floor, "trunc": math.trunc, "sum": lambda *numbers: sum(numbers),
}  # fmt: skip
SYM = {f"sym.{name}": _bounded(function) for name, function in _ARITHMETIC.items()}


@cache
def resolve(name: str) -> Callable[..., Any]:
    """The function behind the name of an allowed op."""
    if name in SYM:
        return SYM[name]
    if name == "aten.sym_size.int":
        return _size
    if name == LITERAL:
        return _literal
    if name == TRUNC_NORMAL:
        return torch.nn.init.trunc_normal_
    assert name in ALLOWED or name in INIT_ALLOWED, name
    _, op, overload = name.split(".")
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, op), overload)
    return function


def _literal(numbers: list[Any], dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).reshape(shape)


def _size(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim]


@cache
def schema_of(name: str) -> torch.FunctionSchema:
    """The schema of an aten op."""
    if name == "aten.sym_size.int":
        schema: torch.FunctionSchema = torch.ops.aten.sym_size.int._schema
        return schema
    return resolve(name)._schema  # type: ignore[attr-defined, no-any-return]


# op -> the arguments that depend on training mode, with their values in evaluation
_EVAL_ARGUMENTS: dict[str, tuple[tuple[str, object], ...]] = {
    "aten.dropout.default": (("train", False),),
    "aten.feature_dropout.default": (("train", False),),
    "aten.alpha_dropout.default": (("train", False),),
    "aten.rrelu.default": (("training", False),),
    "aten.batch_norm.default": (("training", False),),
    "aten.scaled_dot_product_attention.default": (("dropout_p", 0.0),),
    "aten.gru.input": (("train", False),),
    "aten.lstm.input": (("train", False),),
    "aten.rnn_relu.input": (("train", False),),
    "aten.rnn_tanh.input": (("train", False),),
}


def eval_arguments(name: str) -> tuple[tuple[str, object], ...]:
    """The `(name, value)` pairs of the arguments that differ in evaluation."""
    return _EVAL_ARGUMENTS.get(name, ())


@cache
def may_share_memory(name: str) -> bool:
    """Whether a result of the op may alias the memory of an argument."""
    if name in SYM or name in ("aten.sym_size.int", LITERAL):
        return False
    declared = any(a.alias_info is not None for a in schema_of(name).arguments)
    return declared or ALLOWED[name] in ("views", "conversions", "randomness") or name.startswith("aten.meshgrid.")


def writes_statistics(name: str) -> bool:
    """Whether the op writes running statistics, which its schema does not declare."""
    return name in ("aten.batch_norm.default", "aten.instance_norm.default")


@cache
def needs_device(name: str) -> bool:
    """Whether the op creates a tensor without tensor arguments, so that it needs an explicit device."""
    if name in SYM or name in ("aten.sym_size.int", LITERAL, TRUNC_NORMAL):
        return False
    arguments = schema_of(name).arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


@cache
def is_random(name: str) -> bool:
    """Whether the op draws from the random generator."""
    if name == TRUNC_NORMAL:
        return True
    return name.startswith("aten.") and name != "aten.sym_size.int" and _RANDOM in resolve(name).tags  # type: ignore[attr-defined]


_RANDOM = torch.Tag.nondeterministic_seeded
