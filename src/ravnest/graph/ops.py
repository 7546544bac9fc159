"""The allow-list of operations in a stage, and the reason for each family.

Everything here computes new tensors from its arguments and nothing else: no files, no storage, no other
devices, no uninitialised memory, no sizes that depend on data, no custom namespaces. The few private operations are
the only form of a public function of torch.
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

from ravnest.graph.guards import GUARDED

__all__ = [
    "ALLOWED",
    "FAMILIES",
    "INIT_ALLOWED",
    "LITERAL",
    "LITERAL_LIMIT",
    "SYM",
    "TRUNC_NORMAL",
    "WITH_GRADIENT",
    "Family",
    "is_random",
    "may_share_memory",
    "needs_device",
    "resolve",
    "schema_of",
    "eval_arguments",
    "functional_form",
    "overload_of",
    "writes_statistics",
]


class Family(NamedTuple):
    reason: str
    ops: str
    cheap: bool = False  # recomputing it costs less than sending its result


FAMILIES: dict[str, Family] = {
    "views": Family(
        "Views of the same elements; torch checks sizes against the tensor.",
        """adjoint.default alias.default broadcast_tensors.default chunk.default contiguous.default
        detach.default diagonal.default dsplit.array dsplit.int expand.default expand_as.default
        flatten.using_ints hsplit.array hsplit.int imag.default matrix_H.default mH.default moveaxis.int
        moveaxis.intlist movedim.int movedim.intlist mT.default narrow.default numpy_T.default
        permute.default positive.default ravel.default real.default reshape.default reshape_as.default
        select.int slice.Tensor split.sizes split.Tensor split_with_sizes.default squeeze.default
        squeeze.dim squeeze.dims swapaxes.default swapdims.default t.default tensor_split.indices
        tensor_split.sections transpose.int type_as.default unbind.int unflatten.int unfold.default
        unsqueeze.default view.default view.dtype view_as.default view_as_complex.default
        view_as_real.default vsplit.array vsplit.int""",
        cheap=True,
    ),
    "conversions": Family(
        "A copy in another dtype or memory format, always on the interpreter's device.",
        """clone.default conj.default conj_physical.default lift_fresh_copy.default resolve_conj.default
        resolve_neg.default to.device to.dtype to.dtype_layout to.other""",
        cheap=True,
    ),
    "creation": Family(
        "Tensors from constants. Their size is checked before memory is allocated; none are uninitialised.",
        """arange.default arange.start arange.start_step bartlett_window.default bartlett_window.periodic
        blackman_window.default blackman_window.periodic eye.default eye.m fft_fftfreq.default
        fft_rfftfreq.default full.default full_like.default hamming_window.default hamming_window.periodic
        hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window.default
        hann_window.periodic kaiser_window.beta kaiser_window.default kaiser_window.periodic
        linspace.default logspace.default new_full.default new_ones.default new_zeros.default ones.default
        ones_like.default scalar_tensor.default tril_indices.default triu_indices.default zeros.default
        zeros_like.default""",
        cheap=True,
    ),
    "joining": Family(
        "Elements of several tensors, or repeats of one, joined in a new tensor.",
        """block_diag.default broadcast_to.default cat.default channel_shuffle.default column_stack.default
        concat.default concatenate.default constant_pad_nd.default diag.default diag_embed.default
        diagflat.default dstack.default flip.default fliplr.default flipud.default hstack.default
        kron.default meshgrid.default meshgrid.indexing pad.default reflection_pad1d.default
        reflection_pad2d.default reflection_pad3d.default repeat.default repeat_interleave.self_int
        replication_pad1d.default replication_pad2d.default replication_pad3d.default roll.default
        rot90.default row_stack.default stack.default tile.default tril.default triu.default
        vstack.default""",
        cheap=True,
    ),
    "arithmetic": Family(
        "Elementwise arithmetic.",
        """abs.default absolute.default acos.default acosh.default add.Scalar add.Tensor addcdiv.default
        addcmul.default angle.default arccos.default arccosh.default arcsin.default arcsinh.default
        arctan.default arctan2.default arctanh.default asin.default asinh.default atan.default
        atan2.default atanh.default bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
        bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar ceil.default clamp.default
        clamp.Tensor clamp_max.default clamp_max.Tensor clamp_min.default clamp_min.Tensor clip.default
        clip.Tensor complex.default copysign.Scalar copysign.Tensor cos.default cosh.default cross.default
        cumsum.default deg2rad.default diff.default digamma.default div.Scalar div.Scalar_mode div.Tensor
        div.Tensor_mode divide.Scalar divide.Scalar_mode divide.Tensor divide.Tensor_mode erf.default
        erfc.default erfinv.default exp.default exp2.default expm1.default fix.default float_power.Scalar
        float_power.Tensor_Scalar float_power.Tensor_Tensor floor.default floor_divide.default
        floor_divide.Scalar fmax.default fmin.default fmod.Scalar fmod.Tensor frac.default gcd.default
        heaviside.default hypot.default i0.default lcm.default ldexp.Tensor lerp.Scalar lerp.Tensor
        lgamma.default linalg_cross.default log.default log10.default log1p.default log2.default
        logaddexp.default logaddexp2.default logit.default max.other maximum.default min.other
        minimum.default mul.Scalar mul.Tensor multiply.Scalar multiply.Tensor nan_to_num.default
        neg.default negative.default polar.default polygamma.default pow.Scalar pow.Tensor_Scalar
        pow.Tensor_Tensor rad2deg.default reciprocal.default remainder.Scalar remainder.Scalar_Tensor
        remainder.Tensor renorm.default round.decimals round.default rsqrt.default rsub.Scalar rsub.Tensor
        sgn.default sigmoid.default sign.default signbit.default sin.default sinc.default sinh.default
        special_digamma.default special_entr.default special_erf.default special_erfc.default
        special_erfcx.default special_erfinv.default special_exp2.default special_expit.default
        special_expm1.default special_gammaln.default special_i0.default special_i0e.default
        special_i1.default special_i1e.default special_log1p.default special_log_ndtr.default
        special_logit.default special_ndtr.default special_ndtri.default special_polygamma.default
        special_psi.default special_round.default special_sinc.default special_xlog1py.default
        special_xlogy.default sqrt.default square.default sub.Scalar sub.Tensor subtract.Scalar
        subtract.Tensor tan.default tanh.default true_divide.Scalar true_divide.Tensor trunc.default
        xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor""",
        cheap=True,
    ),
    "logic": Family(
        "Comparisons and bitwise operations, as used for masks.",
        """all.default all.dim all.dims any.default any.dim any.dims bitwise_and.Scalar
        bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_not.default bitwise_or.Scalar
        bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor
        bitwise_xor.Tensor eq.Scalar eq.Tensor ge.Scalar ge.Tensor greater.Scalar greater.Tensor
        greater_equal.Scalar greater_equal.Tensor gt.Scalar gt.Tensor isclose.default isfinite.default
        isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor isinf.default isnan.default
        isneginf.default isposinf.default isreal.default le.Scalar le.Tensor less.Scalar less.Tensor
        less_equal.Scalar less_equal.Tensor logical_and.default logical_not.default logical_or.default
        logical_xor.default lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor ne.Scalar ne.Tensor
        not_equal.Scalar not_equal.Tensor where.Scalar where.ScalarOther where.ScalarSelf where.self""",
        cheap=True,
    ),
    "indexing": Family(
        "Elements read or written by index; torch rejects an index out of range.",
        """bucketize.Scalar bucketize.Tensor diagonal_scatter.default embedding.default embedding_bag.default
        embedding_bag.padding_idx gather.default histc.default index.Tensor index_add.default
        index_copy.default index_fill.int_Scalar index_fill.int_Tensor index_put.default
        index_reduce.default index_select.default masked_scatter.default one_hot.default put.default
        scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add.default
        scatter_reduce.two searchsorted.Scalar searchsorted.Tensor select_scatter.default
        slice_scatter.default take.default take_along_dim.default""",
    ),
    "reductions": Family(
        "Sums, means, extremes, norms and sorts over whole dimensions.",
        """amax.default amin.default aminmax.default argmax.default argmin.default argsort.default
        argsort.stable corrcoef.default count_nonzero.default count_nonzero.dim_IntList cov.default
        cummax.default cummin.default cumprod.default cumulative_trapezoid.dx dist.default
        frobenius_norm.dim kthvalue.default linalg_matrix_norm.default linalg_matrix_norm.str_ord
        linalg_norm.default linalg_norm.ord_str linalg_vector_norm.default logcumsumexp.default
        logsumexp.default max.default max.dim mean.default mean.dim median.default median.dim min.default
        min.dim mode.default msort.default nanmean.default nanmedian.default nanmedian.dim
        nanquantile.default nanquantile.scalar nansum.default norm.Scalar norm.ScalarOpt_dim
        norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype nuclear_norm.default prod.default prod.dim_int
        quantile.default quantile.scalar sort.default sort.stable special_logsumexp.default std.correction
        std.default std.dim std_mean.correction std_mean.default std_mean.dim sum.default sum.dim_IntList
        topk.default trace.default trapezoid.dx var.correction var.default var.dim var_mean.correction
        var_mean.default var_mean.dim""",
    ),
    "products": Family(
        "Matrix products and attention, most of the computation.",
        """_grouped_mm.default addbmm.default addmm.default addmv.default addr.default baddbmm.default
        bilinear.default bmm.default cdist.default chain_matmul.default dot.default einsum.default
        ger.default inner.default linalg_matmul.default linalg_matrix_power.default
        linalg_multi_dot.default linalg_vecdot.default linear.default matmul.default matrix_power.default
        mm.default mv.default outer.default scaled_dot_product_attention.default tensordot.default
        vdot.default""",
    ),
    "factorisations": Family(
        "Inverses, factorisations and solutions of systems of small matrices.",
        """cholesky.default cholesky_inverse.default cholesky_solve.default det.default inverse.default
        linalg_cholesky.default linalg_cholesky_ex.default linalg_det.default linalg_eigh.default
        linalg_eigvalsh.default linalg_householder_product.default linalg_inv.default
        linalg_inv_ex.default linalg_lu.default linalg_matrix_exp.default linalg_pinv.atol_rtol_float
        linalg_pinv.default linalg_qr.default linalg_slogdet.default linalg_solve.default
        linalg_solve_triangular.default linalg_svd.default linalg_svdvals.default logdet.default
        matrix_exp.default pinverse.default qr.default slogdet.default svd.default
        triangular_solve.default""",
    ),
    "transforms": Family(
        "Fourier transforms; complex tensors are pairs of real numbers.",
        """fft_fft.default fft_fft2.default fft_fftn.default fft_fftshift.default fft_hfft.default
        fft_ifft.default fft_ifft2.default fft_ifftn.default fft_ifftshift.default fft_ihfft.default
        fft_irfft.default fft_irfft2.default fft_irfftn.default fft_rfft.default fft_rfft2.default
        fft_rfftn.default istft.default stft.center stft.default""",
    ),
    "convolutions": Family(
        "Convolutions, pooling and resampling of images, sequences and volumes.",
        """_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec
        _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec adaptive_avg_pool1d.default
        adaptive_avg_pool2d.default adaptive_avg_pool3d.default adaptive_max_pool1d.default
        adaptive_max_pool2d.default adaptive_max_pool3d.default affine_grid_generator.default
        avg_pool1d.default avg_pool2d.default avg_pool3d.default col2im.default conv1d.default
        conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding conv_tbc.default
        conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input convolution.default
        fractional_max_pool2d.default fractional_max_pool3d.default
        grid_sampler.default grid_sampler_2d.default grid_sampler_3d.default im2col.default
        max_pool1d.default max_pool1d_with_indices.default max_pool2d.default
        max_pool2d_with_indices.default max_pool3d.default max_pool3d_with_indices.default
        max_unpool2d.default max_unpool3d.default pixel_shuffle.default pixel_unshuffle.default
        upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec
        upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec""",
    ),
    "activations": Family(
        "The non-linearities between layers.",
        """celu.default elu.default gelu.default glu.default hardshrink.default hardsigmoid.default
        hardswish.default hardtanh.default leaky_relu.default log_sigmoid.default log_softmax.int
        mish.default prelu.default relu.default relu6.default rrelu.default selu.default silu.default
        softmax.int softplus.default softshrink.default threshold.default""",
    ),
    "normalisation": Family(
        "Normalisation layers; batch and instance norm write only their own running statistics.",
        """_weight_norm.default batch_norm.default cosine_similarity.default group_norm.default
        instance_norm.default layer_norm.default native_group_norm.default native_layer_norm.default
        pairwise_distance.default rms_norm.default""",
    ),
    "randomness": Family(
        "Random numbers from the interpreter's own generator.",
        """_sample_dirichlet.default _standard_gamma.default
        alpha_dropout.default bernoulli.default bernoulli.p bernoulli.Tensor cauchy.default
        dropout.default exponential.default feature_alpha_dropout.default feature_dropout.default
        geometric.default log_normal.default multinomial.default native_dropout.default normal.float_float
        normal.float_Tensor normal.Tensor_float normal.Tensor_Tensor normal_functional.default
        poisson.default rand.default rand_like.default randint.default randint.low randint_like.default
        randint_like.low_dtype randn.default randn_like.default random.default random.from random.to
        randperm.default uniform.default""",
    ),
    "losses": Family(
        "Loss functions that torch implements as one operation.",
        """binary_cross_entropy.default binary_cross_entropy_with_logits.default
        cosine_embedding_loss.default cross_entropy_loss.default ctc_loss.IntList ctc_loss.Tensor
        hinge_embedding_loss.default huber_loss.default kl_div.default l1_loss.default
        margin_ranking_loss.default mse_loss.default multi_margin_loss.default
        multilabel_margin_loss.default nll_loss.default nll_loss2d.default nll_loss_nd.default
        poisson_nll_loss.default smooth_l1_loss.default soft_margin_loss.default
        triplet_margin_loss.default""",
    ),
    "recurrence": Family(
        "Whole recurrent layers; their weights are ordinary parameters.",
        """gru.input gru_cell.default lstm.input lstm_cell.default rnn_relu.input rnn_relu_cell.default
        rnn_tanh.input rnn_tanh_cell.default""",
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
    zero_.default linalg_qr.default geqrf.default randperm.default normal.float_float diagonal_copy.default
    index_put_.default"""

ALLOWED: dict[str, str] = {f"aten.{op}": family for family, entry in FAMILIES.items() for op in entry.ops.split()}
_INIT_FAMILIES = ("views", "conversions", "creation", "joining", "arithmetic", "logic", "indexing", "reductions",
                  "factorisations", "products", "randomness")  # fmt: skip
INIT_ALLOWED: dict[str, str] = {
    **{op: family for op, family in ALLOWED.items() if family in _INIT_FAMILIES},
    **{f"aten.{op}": "initialisation" for op in _INIT_ONLY.split()},
}

LITERAL = "ravnest.literal"  # a small tensor literal in a builder: (numbers, dtype, shape)
LITERAL_LIMIT = 1 << 16
TRUNC_NORMAL = "ravnest.trunc_normal_"  # (tensor, mean, std, a, b): redraws until all values lie between a and b
WITH_GRADIENT = "ravnest.with_gradient"  # (outputs, inputs, saved) with a backward pass of its own
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
    return GUARDED.get(name) or overload_of(name)


def overload_of(name: str) -> Any:
    """The torch operation of an aten op."""
    _, op, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, op), overload)


_FUNCTIONAL = {  # in-place op -> its functional form, where their names differ
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}


def functional_form(name: str) -> str | None:
    """The functional form of an in-place op, if it is allowed."""
    parts = name.split(".")
    if len(parts) != 3 or not parts[1].endswith("_") or parts[1].endswith("__"):
        return None
    found = _FUNCTIONAL.get(name, f"aten.{parts[1][:-1]}.{parts[2]}")
    return found if found in ALLOWED else None


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
    return overload_of(name)._schema  # type: ignore[no-any-return]


# op -> the arguments that depend on training mode, with their values in evaluation
_EVAL_ARGUMENTS: dict[str, tuple[tuple[str, object], ...]] = {
    "aten.dropout.default": (("train", False),),
    "aten.feature_dropout.default": (("train", False),),
    "aten.alpha_dropout.default": (("train", False),),
    "aten.feature_alpha_dropout.default": (("train", False),),
    "aten.native_dropout.default": (("train", False),),
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
    if name in (WITH_GRADIENT, "aten.clone.default", "aten.lift_fresh_copy.default"):
        return name == WITH_GRADIENT
    declared = any(a.alias_info is not None for a in schema_of(name).arguments)
    return declared or ALLOWED[name] in ("views", "conversions", "randomness") or name.startswith("aten.meshgrid.")


def writes_statistics(name: str) -> bool:
    """Whether the op writes running statistics, which its schema does not declare."""
    return name in ("aten.batch_norm.default", "aten.instance_norm.default")


@cache
def needs_device(name: str) -> bool:
    """Whether the op creates a tensor without tensor arguments, so that it needs an explicit device."""
    if name in SYM or name in ("aten.sym_size.int", LITERAL, TRUNC_NORMAL, WITH_GRADIENT):
        return False
    arguments = schema_of(name).arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


@cache
def is_random(name: str) -> bool:
    """Whether the op draws from the random generator."""
    if name == TRUNC_NORMAL:
        return True
    return name.startswith("aten.") and name != "aten.sym_size.int" and _RANDOM in overload_of(name).tags


_RANDOM = torch.Tag.nondeterministic_seeded
