"""Every layer and loss of `torch.nn`, and other operations that users' models call, as small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.case import Case, Subject

__all__ = ["layer_cases", "layers", "loss_cases", "losses", "operation_cases", "operations"]

_SAMPLES = 4


class _Between(nn.Module):
    """A layer between two linear maps over the last dimension, so that gradients flow on both sides of it."""

    def __init__(self, layer: Callable[[], nn.Module], width: int, reduce: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.before, self.layer, self._reduce = nn.Linear(width, width), layer(), reduce
        self.after = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self._reduce(self.layer(self.before(x)))
        return self.after(out.flatten(1).mean(1, keepdim=True))  # type: ignore[no-any-return]


class _Call(nn.Module):
    """A function between two linear maps."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.before, self.after, self._function = nn.Linear(width, width), nn.Linear(1, 1), function

    def forward(self, x: Tensor) -> Tensor:
        out = self._function(self.before(x))
        return self.after(out.flatten(1).mean(1, keepdim=True))  # type: ignore[no-any-return]


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _inputs(*shape: int) -> Tensor:
    return torch.randn(_SAMPLES, *shape, generator=torch.Generator().manual_seed(0))


def _targets() -> Tensor:
    return torch.randn(_SAMPLES, 1, generator=torch.Generator().manual_seed(1))


_ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Identity,
)  # fmt: skip


class _Twice(nn.Module):
    """Passes its input as both arguments of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)  # type: ignore[no-any-return]


class _Shifted(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x, y.roll(1, -1))  # type: ignore[no-any-return]


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


class _Unpool(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{n}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))  # type: ignore[no-any-return]


def _pad(kind: str, n: int) -> nn.Module:
    args = (1, 0.5) if kind == "Constant" else (1,)
    made: nn.Module = getattr(nn, f"{kind}Pad{n}d")(*args)
    return made


def _old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = nn.utils.weight_norm(nn.Linear(8, 3))
    return made


_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{layer.__name__: (layer, (8,)) for layer in _ACTIVATIONS},
    "Threshold": (lambda: nn.Threshold(0.1, 20.0), (8,)),
    "Softmax": (lambda: nn.Softmax(-1), (8,)),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), (8,)),
    "Softmin": (lambda: nn.Softmin(-1), (8,)),
    "Softmax2d": (nn.Softmax2d, (3, 4, 4)),
    "Linear": (lambda: nn.Linear(8, 3), (8,)),
    "Bilinear": (lambda: _Twice(nn.Bilinear(8, 8, 3)), (8,)),
    "LazyLinear": (lambda: nn.LazyLinear(3), (8,)),
    "Flatten": (nn.Flatten, (2, 8)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 4)), (8,)),
    "Fold": (lambda: nn.Fold((4, 4), 2, stride=2), (12, 4)),
    "Unfold": (lambda: nn.Unfold(2, stride=2), (3, 4, 4)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (4, 4, 4)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), (1, 4, 4)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), (4, 4, 4)),
    **{f"Conv{n}d": (partial(getattr(nn, f"Conv{n}d"), 3, 4, 3, padding=1), (3, *[6] * n)) for n in (1, 2, 3)},
    **{f"LazyConv{n}d": (partial(getattr(nn, f"LazyConv{n}d"), 4, 3), (3, *[6] * n)) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (partial(getattr(nn, f"ConvTranspose{n}d"), 3, 4, 3), (3, *[6] * n))
       for n in (1, 2, 3)},
    "Conv2d reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (3, 6, 6)),
    "Conv2d circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6, 6)),
    "Conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2), (4, 6, 6)),
    **{f"{kind}Pool{n}d": (partial(getattr(nn, f"{kind}Pool{n}d"), 2), (3, *[6] * n))
       for kind in ("Max", "Avg") for n in (1, 2, 3)},
    **{f"LPPool{n}d": (partial(getattr(nn, f"LPPool{n}d"), 2, 2), (3, *[6] * n)) for n in (1, 2, 3)},
    **{f"Adaptive{kind}Pool{n}d": (partial(getattr(nn, f"Adaptive{kind}Pool{n}d"), 2), (3, *[6] * n))
       for kind in ("Max", "Avg") for n in (1, 2, 3)},
    **{f"FractionalMaxPool{n}d": (partial(getattr(nn, f"FractionalMaxPool{n}d"), 2, output_size=3), (3, *[8] * n))
       for n in (2, 3)},
    **{f"MaxUnpool{n}d": (partial(_Unpool, n), (3, *[6] * n)) for n in (1, 2, 3)},
    **{f"{kind}Pad{n}d": (partial(_pad, kind, n), (3, *[6] * n))
       for kind in ("Constant", "Reflection", "Replication", "Zero", "Circular") for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": (partial(getattr(nn, f"BatchNorm{n}d"), 3), (3, *[4] * n)) for n in (1, 2, 3)},
    **{f"LazyBatchNorm{n}d": (getattr(nn, f"LazyBatchNorm{n}d"), (3, *[4] * n)) for n in (1, 2, 3)},
    **{f"InstanceNorm{n}d": (partial(getattr(nn, f"InstanceNorm{n}d"), 3, affine=True, track_running_stats=True),
                             (3, *[4] * n)) for n in (1, 2, 3)},
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(8), (8,)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (8,)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (4, 6, 6)),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), (4, 6, 6)),
    **{name: (partial(getattr(nn, name), 0.3), (3, 6)) for name in
       ("Dropout", "AlphaDropout", "FeatureAlphaDropout")},
    **{f"Dropout{n}d": (partial(getattr(nn, f"Dropout{n}d"), 0.3), (3, *[4] * n)) for n in (1, 2, 3)},
    **{f"Upsample {mode}": (partial(nn.Upsample, scale_factor=2, mode=mode), shape) for mode, shape in
       {"nearest": (3, 4, 4), "linear": (3, 4), "bilinear": (3, 4, 4), "bicubic": (3, 4, 4), "trilinear": (3, 4, 4, 4),
        "nearest-exact": (3, 4, 4)}.items()},
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), (3, 4, 4)),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), (3, 4, 4)),
    **{name: (partial(getattr(nn, name), 8, 6, num_layers=2, batch_first=True, dropout=0.1), (5, 8))
       for name in ("RNN", "LSTM", "GRU")},
    "LSTM bidirectional": (lambda: nn.LSTM(8, 6, batch_first=True, bidirectional=True), (5, 8)),
    "LSTM projected": (lambda: nn.LSTM(8, 6, batch_first=True, proj_size=3), (5, 8)),
    **{name: (partial(getattr(nn, name), 8, 6), (8,)) for name in ("RNNCell", "LSTMCell", "GRUCell")},
    "MultiheadAttention": (lambda: _SelfAttention(), (5, 8)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (5, 8)),
    "TransformerEncoder default": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), (5, 8)),
    "TransformerDecoder": (
        lambda: _Twice(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)), (5, 8)),
    "Transformer": (lambda: _Twice(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)), (5, 8)),
    "CosineSimilarity": (lambda: _Twice(nn.CosineSimilarity()), (3, 8)),
    "PairwiseDistance": (lambda: _Twice(_Shifted(nn.PairwiseDistance())), (3, 8)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), (8,)),
    "old weight_norm": (lambda: _old_weight_norm(), (8,)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), (8,)),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(8, 3)), (8,)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), (8,)),
}  # fmt: skip


class _Tokens(nn.Module):
    """A layer over token ids."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.after = layer, nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.layer(ids)
        return self.after(out.flatten(1, -2).mean(1) if out.dim() > 2 else out)  # type: ignore[no-any-return]


def _regression(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return _inputs(*shape), _targets()


def _classified(targets: Any) -> tuple[Tensor, Any]:
    return _inputs(6), targets


def _tokens(layer: Callable[[], nn.Module]) -> nn.Module:
    return _Tokens(layer())


def layer_cases() -> Iterator[Case]:
    for name, (make, shape) in _LAYERS.items():
        yield Case(
            name, "layer", partial(_Between, make, shape[-1], _first),
            F.mse_loss, partial(_regression, shape),
        )  # fmt: skip
    ids = torch.randint(0, 10, (_SAMPLES, 5), generator=torch.Generator().manual_seed(0))
    for name, layer in {
        "Embedding": lambda: nn.Embedding(10, 8, padding_idx=0),
        "Embedding max_norm": lambda: nn.Embedding(10, 8, max_norm=1.0),
        "EmbeddingBag": lambda: nn.EmbeddingBag(10, 8),
        "EmbeddingBag sum": lambda: nn.EmbeddingBag(10, 8, mode="sum"),
        "EmbeddingBag max": lambda: nn.EmbeddingBag(10, 8, mode="max"),
    }.items():
        yield Case(name, "layer", partial(_tokens, layer), F.mse_loss, lambda: (ids, _targets()))


def loss_cases() -> Iterator[Case]:
    """Losses of `torch.nn` over a linear model."""
    generator = torch.Generator().manual_seed(2)
    positive = torch.rand(_SAMPLES, 6, generator=generator)
    classes = torch.randint(0, 6, (_SAMPLES,), generator=generator)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    real = torch.randn(_SAMPLES, 6, generator=generator)
    losses: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any]] = {
        "L1Loss": (nn.L1Loss(), real),
        "MSELoss": (nn.MSELoss(), real),
        "CrossEntropyLoss": (nn.CrossEntropyLoss(label_smoothing=0.1), classes),
        "CrossEntropyLoss weighted": (nn.CrossEntropyLoss(weight=torch.arange(1.0, 7.0)), classes),
        "CrossEntropyLoss ignored": (nn.CrossEntropyLoss(ignore_index=3), classes),
        "CrossEntropyLoss soft": (nn.CrossEntropyLoss(), positive.softmax(-1)),
        "NLLLoss": (lambda y, t: nn.NLLLoss()(y.log_softmax(-1), t), classes),
        "PoissonNLLLoss": (nn.PoissonNLLLoss(), positive),
        "GaussianNLLLoss": (lambda y, t: nn.GaussianNLLLoss()(y, t, y.exp()), real),
        "KLDivLoss": (lambda y, t: nn.KLDivLoss(reduction="batchmean")(y.log_softmax(-1), t), positive.softmax(-1)),
        "BCELoss": (lambda y, t: nn.BCELoss()(y.sigmoid(), t), positive),
        "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 7.0)), positive),
        "HuberLoss": (nn.HuberLoss(), real),
        "SmoothL1Loss": (nn.SmoothL1Loss(), real),
        "SoftMarginLoss": (nn.SoftMarginLoss(), real.sign()),
        "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), positive.round()),
        "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), torch.tensor([[3, 0, -1, 1, 2, 4]] * _SAMPLES)),
        "MultiMarginLoss": (nn.MultiMarginLoss(), classes),
        "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), real.sign()),
        "MarginRankingLoss": (lambda y, t: nn.MarginRankingLoss(0.1)(y[:, 0], y[:, 1], t), signs),
        "CosineEmbeddingLoss": (lambda y, t: nn.CosineEmbeddingLoss(0.1)(y[:, :3], y[:, 3:], t), signs),
        "TripletMarginLoss": (lambda y, t: nn.TripletMarginLoss()(y, t, t.flip(1)), real),
        "TripletMarginWithDistanceLoss": (lambda y, t: nn.TripletMarginWithDistanceLoss()(y, t, t.flip(1)), real),
        "CTCLoss": (_ctc, torch.randint(1, 6, (_SAMPLES, 2), generator=generator)),
        "AdaptiveLogSoftmaxWithLoss": (_Adaptive(), classes),
    }
    for name, (loss, targets) in losses.items():
        yield Case(
            name, "loss", lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), loss,
            partial(_classified, targets),
        )  # fmt: skip


class _Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(6, 6, [2, 4], div_value=1.0)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return self.loss(y, t).loss  # type: ignore[no-any-return]


def _grid_sample(x: Tensor) -> Tensor:
    angles = torch.eye(2, 3).expand(x.shape[0], 2, 3)
    grid = F.affine_grid(angles, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _ctc(y: Tensor, t: Tensor) -> Tensor:
    log_probabilities = y.log_softmax(-1).expand(5, *y.shape)
    lengths = torch.full((y.shape[0],), 5), torch.full((y.shape[0],), 2)
    return F.ctc_loss(log_probabilities, t, *lengths)


_OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "fft": (lambda x: torch.fft.fft(x).abs(), (8,)),
    "rfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5), (8,)),
    "fft2": (lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real, (3, 4, 4)),
    "stft": (lambda x: torch.stft(x, 8, 4, window=torch.hann_window(8), return_complex=True).abs(), (32,)),
    "complex numbers": (lambda x: torch.view_as_real(torch.complex(x, x).exp()).flatten(1), (8,)),
    "polar": (lambda x: torch.polar(x.abs(), x).real, (8,)),
    "grid_sample": (lambda x: _grid_sample(x), (3, 4, 4)),
    "interpolate antialias": (lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True), (3, 6, 6)),
    "interpolate area": (lambda x: F.interpolate(x, size=(3, 3), mode="area"), (3, 6, 6)),
    "interpolate 3d": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (2, 3, 4, 4)),
    "inverse": (lambda x: torch.linalg.inv(x @ x.mT + torch.eye(4)), (4, 4)),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)), (4, 4)),
    "solve": (lambda x: torch.linalg.solve(x @ x.mT + torch.eye(4), x), (4, 4)),
    "det": (lambda x: torch.linalg.slogdet(x @ x.mT + torch.eye(4))[1][:, None], (4, 4)),
    "eigh": (lambda x: torch.linalg.eigvalsh(x + x.mT), (4, 4)),
    "svd": (lambda x: torch.linalg.svdvals(x), (4, 3)),
    "qr": (lambda x: torch.linalg.qr(x)[1], (4, 4)),
    "matrix_exp": (lambda x: torch.linalg.matrix_exp(x), (4, 4)),
    "matrix_norm": (lambda x: torch.linalg.matrix_norm(x)[:, None], (4, 4)),
    "roll": (lambda x: x.roll(1, -1), (8,)),
    "flip": (lambda x: x.flip(-1), (8,)),
    "unfold": (lambda x: x.unfold(-1, 3, 2), (8,)),
    "diff": (lambda x: x.diff(dim=-1), (8,)),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, tau=0.5), (8,)),
    "gumbel_softmax hard": (lambda x: F.gumbel_softmax(x, hard=True), (8,)),
    "stochastic depth": (lambda x: x * torch.empty(x.shape[0], 1).bernoulli_(0.7) / 0.7, (8,)),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), (8,)),
    "multinomial": (lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 2)), (8,)),
    "normal noise": (lambda x: x + torch.normal(0.0, 1.0, x.shape), (8,)),
    "uniform_": (lambda x: x + torch.empty_like(x).uniform_(), (8,)),
    "normal_": (lambda x: x + torch.zeros_like(x).normal_(), (8,)),
    "randperm": (lambda x: x[:, torch.randperm(8)], (8,)),
    "cumsum": (lambda x: x.cumsum(-1) + x.cumprod(-1) + x.logcumsumexp(-1), (8,)),
    "cummax": (lambda x: x.cummax(-1)[0] + x.cummin(-1)[0], (8,)),
    "kthvalue": (lambda x: x.kthvalue(2, -1)[0][:, None], (8,)),
    "median": (lambda x: x.median(-1)[0][:, None], (8,)),
    "quantile": (lambda x: x.quantile(0.3, -1)[:, None], (8,)),
    "mode": (lambda x: x.mode(-1)[0][:, None], (8,)),
    "sort": (lambda x: x.sort(-1)[0], (8,)),
    "topk": (lambda x: x.topk(3)[0], (8,)),
    "histc": (lambda x: x + torch.histc(x.detach(), 4, -1, 1).sum(), (8,)),
    "bucketize": (lambda x: x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)), (8,)),
    "searchsorted": (lambda x: x * torch.searchsorted(torch.linspace(-1, 1, 5), x.detach()), (8,)),
    "einsum": (lambda x: torch.einsum("bi,bj->bij", x, x), (8,)),
    "cdist": (lambda x: torch.cdist(x, x), (3, 8)),
    "cross": (lambda x: torch.linalg.cross(x[:, :3], x[:, 3:6]), (8,)),
    "kron": (lambda x: x + torch.kron(torch.ones(4), torch.ones(2)), (8,)),
    "logit": (lambda x: x.sigmoid().logit(), (8,)),
    "special": (lambda x: torch.special.erfcx(x) + torch.special.i0(x) + torch.digamma(x.exp()), (8,)),
    "trigonometry": (lambda x: x.asinh() + x.atan() + x.tanh().atanh() + (x * x + 1).acosh() + x.sinh(), (8,)),
    "scatter_reduce": (lambda x: x.scatter_reduce(1, torch.zeros_like(x, dtype=torch.int64), x, "amax"), (8,)),
    "index_reduce": (lambda x: x.index_add(1, torch.tensor([0, 1]), x[:, :2]), (8,)),
    "masked_select": (lambda x: torch.where(x > 0, x, x.new_zeros(())), (8,)),
    "tril mask": (lambda x: x.masked_fill(torch.ones(5, 5).tril() == 0, -1.0), (5, 5)),
    "vmap": (lambda x: torch.vmap(lambda row: row * row.sum())(x), (8,)),
    "nan_to_num": (lambda x: x.log().nan_to_num(), (8,)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) + x.clip(min=-1) + x.clamp_max(1), (8,)),
    "addcmul": (lambda x: torch.addcmul(x, x, x) + torch.addcdiv(x, x, x.exp()) + torch.lerp(x, x * 2, 0.3), (8,)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (8,)),
    "normalize": (lambda x: F.normalize(x), (8,)),
    "swapdims": (lambda x: x.swapdims(1, 2).rot90(1, (1, 2)), (4, 4)),
    "tensor_split": (lambda x: torch.cat(x.tensor_split(3, -1), -1), (8,)),
    "pad modes": (lambda x: F.pad(x, (1, 1), "replicate") + F.pad(x, (1, 1), "reflect"), (3, 8)),
    "pad circular": (lambda x: F.pad(x, (1, 1), "circular"), (3, 8)),
    "one_hot": (lambda x: x @ F.one_hot(torch.arange(8), 8).float(), (8,)),
    "trace": (lambda x: x.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True), (4, 4)),
    "var_mean": (lambda x: torch.cat(torch.var_mean(x, -1, keepdim=True), -1), (8,)),
    "std_mean": (lambda x: torch.cat(torch.std_mean(x, -1, keepdim=True), -1), (8,)),
    "double": (lambda x: x.double().exp().float(), (8,)),
    "bfloat16": (lambda x: (x.bfloat16() * 2).float(), (8,)),
    "int division": (lambda x: x + (torch.arange(8) // 2) % 3, (8,)),
    "as_strided": (lambda x: x.as_strided((x.shape[0], 4), (8, 2)), (8,)),
}  # fmt: skip


def operation_cases() -> Iterator[Case]:
    for name, (function, shape) in _OPERATIONS.items():
        yield Case(
            name, "operation", partial(_Call, function, shape[-1]), F.mse_loss,
            partial(_regression, shape),
        )  # fmt: skip


def _subject(case: Case) -> Subject:
    return Subject(case.name, case.group, lambda: [case])


def layers() -> Iterator[Subject]:
    yield from map(_subject, layer_cases())


def losses() -> Iterator[Subject]:
    yield from map(_subject, loss_cases())


def operations() -> Iterator[Subject]:
    yield from map(_subject, operation_cases())
