"""A linear layer in 8-bit floats on the quantize and scaled_matmul ops: for inference with codes for weights, or for
training with 16- or 32-bit weights, of which each step makes codes.

The recipes: rows of weights beside tokens, as vLLM and torchao's "rowwise" have them; blocks, DeepSeek-AI 2024,
"DeepSeek-V3 technical report", section 3.3; one scale a tensor, float8_e4m3fn forward and float8_e5m2 for gradients,
and scales of past steps: Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from portakern.api import Op
from portakern.core.call import Call
from portakern.core.dispatch import routes, taking
from portakern.core.explain import explain as explained
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.casting import widened
from portakern.frameworks.torch.functions import kept_op

__all__ = ["RECIPES", "Float8Linear", "Float8Recipe", "SharedCodes"]

BLOCK = 128
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
LEAST_SCALE = 2.0**-126
"""The least scale that the quantize op takes."""
STEPS = 16
"""How many steps the "delayed" recipe looks back."""
WIDE = (torch.bfloat16, torch.float16, torch.float32)


class Float8Recipe(NamedTuple):
    """How a layer's arrays become codes.

    Attributes:
      trains: weights stay in 16 or 32 bits and get gradients; otherwise codes are all that there is of them.
      block: rows and columns of a weight, and numbers of a token, that share a scale; None: a row of the weight, and a
        token.
      delayed: scales follow from the largest numbers of past steps.
      text: for whom it is, in words.
    """

    trains: bool
    block: int | None = None
    delayed: bool = False
    text: str = ""


RECIPES = {
    "rows": Float8Recipe(False, None, text="inference, a scale for each row of the weight and for each token"),
    "blocks": Float8Recipe(
        False, BLOCK, text="inference, a scale for 128 x 128 weights and for 128 numbers of a token"
    ),
    "dynamic": Float8Recipe(True, text="training, a scale for each tensor, from its largest number"),
    "delayed": Float8Recipe(
        True, delayed=True, text=f"training, a scale for each tensor, from its largest numbers of {STEPS} past steps"
    ),
}
"""What ``recipe`` may be."""


class LastCodes(NamedTuple):
    """Codes that were made, for layers that have not asked for them.

    Attributes:
      x: a weak reference to what they are of. version: of x, which rises when x is written to. stream: on which they
        were made. readers: the layers that have them. codes: they, and their scales.
    """

    x: weakref.ReferenceType[Tensor]
    version: int
    stream: Any
    readers: list[int]
    codes: tuple[Tensor, Tensor]


class SharedCodes:
    """The codes of the last x, which several layers of one module multiply: those of queries, keys and values.

    A layer gets them once. So a step that is repeated on the same tensor, as under a CUDA graph, makes them again. They
    are freed with x, when x is written to they are made anew, and of tensors that do not count how often they were
    written to (torch.inference_mode) nothing is kept. Copies and pickles are without codes.
    """

    __slots__ = ("__weakref__", "last")

    def __init__(self) -> None:
        self.last: LastCodes | None = None

    def of(self, layer: nn.Module, x: Tensor, made: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The codes of x: kept ones, or those that ``made`` returns."""
        if x.is_inference():
            return made()
        last, version, stream, reader = self.last, x._version, _stream_of(x), id(layer)
        known = last is not None and last.x() is x and (last.version, last.stream) == (version, stream)
        if last is not None and known and reader not in last.readers:
            last.readers.append(reader)
            return last.codes
        last = self.last = LastCodes(weakref.ref(x, self._forget), version, stream, [reader], made())
        return last.codes

    def _forget(self, dead: Any) -> None:
        if self.last is not None and self.last.x is dead:
            self.last = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedCodes, ()


def _stream_of(x: Tensor) -> Any:
    """Where kernels on a tensor are queued now, and whether a graph records them."""
    if not x.is_cuda:
        return None
    return torch.cuda.current_stream(x.device).cuda_stream, torch.cuda.is_current_stream_capturing()


class Float8Linear(nn.Module):
    """``torch.nn.Linear`` whose product multiplies 8-bit floats: x weight^T + bias, in the dtype of x.

    For inference (recipes "rows" and "blocks") the weight is made into codes once, and no other weight is kept. In
    training (recipes "dynamic" and "delayed") ``weight`` is a parameter of 16 or 32 bits, as in ``torch.nn.Linear``;
    codes of it and of x are made in each step, float8_e4m3fn with a scale for each tensor, and those of the
    gradient are float8_e5m2. Products of codes are summed as "promoted" of the scaled_matmul op says.

    >>> layer = portakern.torch.Float8Linear.from_linear(linear.eval())
    >>> y = layer(x)

    A number x of a block with the scale s = max |x| / 448 becomes one that differs by at most 2^-4 |x| + 2^-10 s
    (float8_e5m2: s = max |x| / 57344, and 2^-3 |x| + 2^-17 s), nearly. Of numbers of random signs a result differs by
    some 0.04 of its size in the root mean square, and a gradient by some 0.06.

    ``.to(dtype)``, ``.half()`` and their like convert a bias and a weight in training, and leave codes, scales and
    histories as they are, which move between devices. ``load_state_dict`` refuses a weight of another dtype than codes
    have, since copying would round it without a scale.

    Under torch.autocast the result has autocast's dtype, as that of ``torch.nn.Linear`` has.

    Attributes:
      in_features, out_features: extents. recipe: a key of ``RECIPES``. backend: the backend that must run it, or None.
      weight: for inference a buffer (out_features, in_features) of float8_e4m3fn; in training a parameter.
      weight_scale: for inference a buffer, float32: (out_features, 1) of "rows", and of "blocks" (out_features / 128,
        in_features / 128), rounded up. It multiplies codes, as ``weight_scale`` of compressed-tensors and
        ``weight_scale_inv`` of DeepSeek's checkpoints do.
      bias: a parameter (out_features), or None.
      shared: where layers that get the same x, one after the other, find the codes that the first of them has made.
      input_history, weight_history, gradient_history: of the "delayed" recipe, buffers (16) of float32: the largest
        |number| of past steps, 0 where none was. A forward pass that activation checkpointing repeats counts twice.
    """

    in_features: int
    out_features: int
    recipe: str
    backend: str | None
    weight: Tensor
    weight_scale: Tensor
    input_history: Tensor
    weight_history: Tensor
    gradient_history: Tensor
    shared: SharedCodes | None = None
    dtype_source: Tensor
    """Without elements, of the dtype that weights would have after the conversions that were asked for."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str = "rows",
        backend: str | None = None,
    ) -> None:
        """A layer for ``load_state_dict``, or for training with weights as ``torch.nn.Linear`` draws them.

        Args:
          in_features, out_features, bias, device, dtype: as ``torch.nn.Linear`` takes them. For inference codes are
            zeros, and dtype is the bias's.
          recipe: a key of ``RECIPES``. backend: the backend that must run it; None: chosen from the arrays.

        Raises:
          SpecError: an unknown recipe or dtype. UnsupportedError: extents that the recipe cannot serve.
        """
        super().__init__()
        why = _refusal(in_features, out_features, recipe, dtype or torch.get_default_dtype())
        if why:
            raise UnsupportedError(f"Float8Linear: {why}")
        self.in_features, self.out_features, self.recipe, self.backend = in_features, out_features, recipe, backend
        kind = RECIPES[recipe]
        if kind.trains:
            made = nn.Linear(in_features, out_features, bias, device, dtype)
            self.weight, self.bias = made.weight, made.bias
            for name in HISTORIES if kind.delayed else ():
                self.register_buffer(name, torch.zeros(STEPS, device=device))
            return
        self.register_buffer("weight", torch.zeros(out_features, in_features, device=device).to(FORWARD))
        height = kind.block or 1
        blocks = -(-out_features // height), -(-in_features // (kind.block or in_features))
        self.register_buffer("weight_scale", torch.ones(blocks, device=device))
        self.register_buffer("dtype_source", torch.empty(0, device=device, dtype=dtype), persistent=False)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: str = "rows", *, backend: str | None = None) -> Float8Linear:
        """The layer that stands for a linear layer, which does not change.

        Args:
          linear: a ``torch.nn.Linear`` of 16 or 32 bits. Its bias, and in training its weight, are the new layer's
            too: the same parameters.
          recipe: a key of ``RECIPES``: "rows" or "blocks" for inference, "dynamic" or "delayed" for training.
          backend: the backend that must run it; None: chosen from the arrays.

        Returns:
          A layer on the same device, in the same mode (``training``).

        Raises:
          SpecError: an unknown recipe; a module that is no linear layer. UnsupportedError: extents or a dtype that the
            recipe cannot serve; a device whose kernels cannot.
        """
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            raise SpecError(
                f"Float8Linear: linear is a {type(linear).__name__}; expected a torch.nn.Linear with PyTorch's forward"
            )
        weight, bias = linear.weight, linear.bias
        shape = linear.in_features, linear.out_features
        why = _refusal(*shape, recipe, weight.dtype)
        if why:
            raise UnsupportedError(f"Float8Linear: {why}")
        made = cls(*shape, bias is not None, "meta", weight.dtype, recipe=recipe, backend=backend)
        made._parameters["bias"] = bias
        if RECIPES[recipe].trains:
            made._parameters["weight"] = weight
            for name in HISTORIES if RECIPES[recipe].delayed else ():
                made._buffers[name] = torch.zeros(STEPS, device=weight.device)
        else:
            made.dtype_source = weight.detach().new_empty(0)
            if weight.device.type != "meta":
                made.weight, made.weight_scale = _codes_of_weight(weight.detach(), RECIPES[recipe].block, backend)
        refused = made.why_not()
        if refused:
            raise UnsupportedError(f"Float8Linear: {refused}")
        return made.train(linear.training)

    def why_not(self) -> str:
        """Why the device's kernels cannot multiply these codes, in words; "" where they can, or on no device yet."""
        if self.weight.device.type == "meta" or torch.compiler.is_compiling():
            return ""
        product = kept_op("scaled_matmul", self.backend)
        try:
            call = self._product_call(product, 1)
            found = routes(call, product.choice)
            if found is not None:
                taking(found, call, {})
        except UnsupportedError as e:
            return str(e)
        return ""

    def explain(self, x: Tensor) -> str:
        """What serves the forward pass of x: ``explain`` of quantize and of scaled_matmul. Nothing runs."""
        rows, kind = x.detach().reshape(-1, self.in_features), RECIPES[self.recipe]
        width, height = kind.block or self.in_features, len(rows) if kind.trains else 1
        codes = kept_op("quantize", self.backend).explain(rows, height=height, width=width, to=FORWARD)
        product = kept_op("scaled_matmul", self.backend)
        return f"{codes}\n{explained(self._product_call(product, len(rows)), product.choice)}"

    def _product_call(self, product: Op, rows: int) -> Call:
        """The product of so many rows, whose values do not count."""
        kind, device = RECIPES[self.recipe], self.weight.device
        blocks = 1 if kind.block is None else -(-self.in_features // kind.block)
        codes = torch.empty(rows, self.in_features, dtype=FORWARD, device=device)
        weight = torch.empty_like(self.weight.detach(), dtype=FORWARD)
        scale_x = torch.ones(1 if kind.trains else rows, blocks, device=device)
        scale = torch.ones(1, 1, device=device) if kind.trains else self.weight_scale.t()
        return product.bind(codes, weight.t(), scale_x, scale, n_width=kind.block or 1, k_width=BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) of 16 or 32 bits -> (..., out_features), in its dtype or autocast's.

        Raises:
          SpecError: another shape or dtype. UnsupportedError: a layer for inference in training.
        """
        if x.dtype not in WIDE or x.dim() == 0 or x.shape[-1] != self.in_features:
            raise SpecError(
                f"Float8Linear: x is {x.dtype} {tuple(x.shape)}; expected bfloat16, float16 or float32 "
                f"(..., {self.in_features})"
            )
        out_dtype = _result_dtype(x)
        rows, trains = x.reshape(-1, self.in_features), RECIPES[self.recipe].trains
        if self.training and torch.is_grad_enabled() and not trains:
            raise UnsupportedError(
                f"Float8Linear: the module is in training, and recipe {self.recipe!r} is for inference: its weight has "
                "no gradient; expected one of 'dynamic', 'delayed' to train, or call eval(), or torch.no_grad()"
            )
        if not len(rows) and trains:  # no number to round: PyTorch's own has the shapes and gradients
            y = nn.functional.linear(rows.to(self.weight.dtype), self.weight, self.bias).to(out_dtype)
        else:
            y = (self._trained if trains else self._inferred)(rows, *self._codes_of(x, rows), out_dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def takes_codes(self) -> bool:
        """Whether :meth:`of_codes` is what a call is now: of a layer for inference, where nobody asks for gradients."""
        return not RECIPES[self.recipe].trains and not torch.is_grad_enabled()

    def code_options(self) -> dict[str, Any]:
        """By which options an op that quantises makes codes of x for a layer for inference."""
        return {"width": RECIPES[self.recipe].block or self.in_features, "to": FORWARD}

    def of_codes(self, q: Tensor, scale: Tensor, like: Tensor) -> Tensor:
        """The layer for inference of an x that was made into codes by the op that computed it.

        Args:
          q, scale: codes (..., in_features) and their scales (..., groups), by ``code_options``.
          like: a tensor of the dtype that x would have.

        Returns:
          (..., out_features), as ``forward`` of x; x was never rounded to its dtype.
        """
        y = self._inferred(like, q.reshape(-1, self.in_features), scale.flatten(0, -2), _result_dtype(like))
        return y.view(*q.shape[:-1], self.out_features)

    def _inferred(self, rows: Tensor, q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        block, bias = RECIPES[self.recipe].block, None if self.bias is None else self.bias.detach()
        product = q, scale, self.weight, self.weight_scale, bias, block, out_dtype, self.backend
        if torch.is_grad_enabled() and rows.requires_grad:
            return cast(Tensor, _WithoutGradient.apply(rows, *product))
        return _product_of_codes(*product)

    def _trained(self, rows: Tensor, q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
        of_weight = history = None
        if RECIPES[self.recipe].delayed:
            of_weight = _delayed_scale(self.weight, self.weight_history, FORWARD, self.training)
            history = self.gradient_history
        product = self.weight, self.bias, q, scale, of_weight, history, out_dtype, self.backend
        return cast(Tensor, _TrainedProduct.apply(rows, *product))

    def _codes_of(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of x as rows, and the scales that multiply the product; those that a layer beside this one has made."""
        kind = RECIPES[self.recipe]

        def made() -> tuple[Tensor, Tensor]:
            if kind.trains:
                given = _delayed_scale(rows, self.input_history, FORWARD, self.training) if kind.delayed else None
                return _tensor_codes(rows.detach(), FORWARD, given, self.backend)
            q, scale = kept_op("quantize", self.backend)(rows.detach(), height=1, **self.code_options())
            return q, scale

        if self.shared is None or kind.delayed or torch.compiler.is_compiling():
            return made()
        return self.shared.of(self, x, made)

    def give_back(self, linear: nn.Linear) -> None:
        """Hand a linear layer, which this one was made from, what happened since: the device and the dtype to which the
        model was moved, parameters that are shared, and the mode."""
        linear.train(self.training)
        if RECIPES[self.recipe].trains:
            linear._parameters["weight"] = self._parameters["weight"]
        elif self.weight.device.type != "meta":
            linear.to(device=self.weight.device, dtype=self.dtype_source.dtype)
        linear._parameters["bias"] = self._parameters["bias"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float8Linear:
        """As every module's, but codes, scales and histories, which conversions of floats would spoil, go by as
        integers of their size."""
        kept = {name: x for name, x in self._buffers.items() if x is not None and name != "dtype_source"}
        for name in kept:
            del self._buffers[name]
        try:
            super()._apply(fn, recurse)
            moved = {name: _as_integers(fn, x) for name, x in kept.items()}
        except BaseException:
            self._buffers.update(kept)
            raise
        self._buffers.update(moved)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name, own in self._buffers.items():
            given = state_dict.get(prefix + name)
            if own is not None and isinstance(given, Tensor) and given.dtype != own.dtype:
                error_msgs.append(
                    f"{prefix}{name} is {given.dtype}; expected {own.dtype}, since a copy would round without scales: "
                    "load it into a torch.nn.Linear, and call Float8Linear.from_linear"
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        named = "" if self.backend is None else f", backend={self.backend!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe!r}{named}"
        )


def _result_dtype(x: Tensor) -> torch.dtype:
    """Of a layer's result: the dtype of x, or autocast's."""
    return torch.get_autocast_dtype(x.device.type) if widened(x) else x.dtype


HISTORIES = ("input_history", "weight_history", "gradient_history")


def _refusal(in_features: int, out_features: int, recipe: str, dtype: torch.dtype) -> str:
    """Why no layer of these extents and this dtype has a recipe, in words; "" where one has."""
    if recipe not in RECIPES:
        known = "; ".join(f"{name!r}: {kind.text}" for name, kind in RECIPES.items())
        raise SpecError(f"Float8Linear: recipe is {recipe!r}; expected one of {known}")
    if dtype not in WIDE:
        return f"its weight is {dtype}; expected bfloat16, float16 or float32"
    if in_features < 1 or out_features < 1:
        return f"it is {out_features} x {in_features}; expected at least 1 x 1"
    block = RECIPES[recipe].block
    if block is not None and in_features % block:
        return f"in_features is {in_features}; recipe {recipe!r} expects a multiple of {block}: recipe 'rows' has none"
    return ""


def _as_integers(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a conversion of a module's tensors makes of one that keeps its dtype."""
    bits = x.view(torch.uint8 if x.element_size() == 1 else torch.int32)
    moved = fn(bits)
    return moved.view(x.dtype) if moved.dtype == bits.dtype else x.to(moved.device)


# ----------------------------------------------------------------------------------------------------------- inference


def _codes_of_weight(weight: Tensor, block: int | None, backend: str | None) -> tuple[Tensor, Tensor]:
    """Codes (n, k) of a weight, and the scales of its rows or blocks, the last of which may be short along n."""
    n, k = weight.shape
    quantize = kept_op("quantize", backend)
    if block is None:
        q, scale = quantize(weight, height=1, width=k, to=FORWARD)
        return q, scale
    tall = nn.functional.pad(weight, (0, 0, 0, -n % block))
    q, scale = quantize(tall, height=block, width=block, to=FORWARD)
    return q[:n].clone() if len(tall) > n else q, scale


def _product_of_codes(
    q: Tensor, scale_x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, block: int | None,
    out_dtype: torch.dtype, backend: str | None,
) -> Tensor:  # fmt: skip
    """The codes (m, k) of x beside those (n, k) of a weight, each with their scales -> (m, n)."""
    y: Tensor = kept_op("scaled_matmul", backend)(
        q, weight.t(), scale_x, scale.t(), None if bias is None else bias.float(), n_width=block or 1, k_width=BLOCK,
        out_dtype=out_dtype,
    )  # fmt: skip
    return y


class _WithoutGradient(torch.autograd.Function):
    """The product of a layer for inference, whose backward pass refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *product: Any) -> Tensor:
        return _product_of_codes(*product)

    @staticmethod
    def backward(ctx: Any, *d_y: Any) -> Any:
        raise UnsupportedError(
            "Float8Linear: a gradient is wanted of a layer for inference, which has none; expected recipe 'dynamic' or "
            "'delayed' to train, or torch.no_grad() around the forward pass"
        )


# ------------------------------------------------------------------------------------------------------------ training


def _delayed_scale(x: Tensor, history: Tensor, to: torch.dtype, keeps: bool) -> tuple[Tensor, Tensor]:
    """(the scale of x by the largest number of past steps, or of x where none was; that scale, or NaN if x has a NaN or
    an infinity, which would saturate). Both (1, 1). keeps: x becomes one of the past steps.

    The second multiplies the product: without it a step that overflowed would look like any other.
    """
    with torch.no_grad():
        top = torch.linalg.vector_norm(x.detach(), inf, dtype=torch.float32)
        finite = top.isfinite()
        past = history.amax()
        now = torch.where(past > 0, past, torch.where(finite, top, 0.0))
        scale = torch.where(now > 0, (now / torch.finfo(to).max).clamp(LEAST_SCALE, 1 / LEAST_SCALE), 1.0).view(1, 1)
        if keeps:
            history.copy_(torch.cat([torch.where(finite, top, 0.0).view(1), history[:-1]]))
        return scale, torch.where(finite, scale, torch.nan)


def _tensor_codes(
    x: Tensor, to: torch.dtype, given: tuple[Tensor, Tensor] | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Codes of x (m, n) with one scale, found or given, and the scale (1, 1) that multiplies the product."""
    m, n = x.shape
    q, scale = kept_op("quantize", backend)(x, None if given is None else given[0], height=m, width=n, to=to)
    return q, scale if given is None else given[1]


class _TrainedProduct(torch.autograd.Function):
    """y = x weight^T + bias, d_x = d_y weight, d_weight = d_y^T x, each of codes with one scale a tensor: those of x
    and weight are float8_e4m3fn, those of d_y float8_e5m2. d_bias is summed from d_y itself, in float32.

    x is there for its gradient; q_x and s_x are its codes, of which the backward pass keeps one byte a number. The
    codes of the weight are made again for it. The op copies factors that lie otherwise than a matrix unit reads them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, q_x: Tensor, s_x: Tensor,
        of_weight: tuple[Tensor, Tensor] | None, history: Tensor | None, out_dtype: torch.dtype, backend: str | None,
    ) -> Tensor:  # fmt: skip
        q_w, s_w = _tensor_codes(weight, FORWARD, of_weight, backend)
        # the scale by which codes of the weight are made again
        again = s_w if of_weight is None else of_weight[0]
        ctx.save_for_backward(q_x, s_x, weight, s_w, again)
        ctx.history, ctx.backend = history, backend
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        y: Tensor = kept_op("scaled_matmul", backend)(
            q_x, q_w.t(), s_x, s_w, None if bias is None else bias.float(), out_dtype=out_dtype
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        q_x, s_x, weight, s_w, again = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        product = kept_op("scaled_matmul", ctx.backend)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[2]:
            d_bias = d_y.sum(0, dtype=torch.float32).to(of_bias)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            given = None if ctx.history is None else _delayed_scale(d_y, ctx.history, BACKWARD, True)
            q, s = _tensor_codes(d_y, BACKWARD, given, ctx.backend)
        if ctx.needs_input_grad[0]:
            q_w, _ = _tensor_codes(weight.detach(), FORWARD, (again, s_w), ctx.backend)
            d_x = product(q, q_w, s, s_w, out_dtype=of_x)
        if ctx.needs_input_grad[1]:
            d_weight = product(q.t(), q_x, s, s_x, out_dtype=of_weight)
        return d_x, d_weight, d_bias, *[None] * 6
