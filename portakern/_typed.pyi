# Written by "portakern report" from the specs: change those, and run it again.
"""What type checkers and editors see of ``portakern.op``: each op's own signature, by its name."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

from numpy.typing import NDArray

from portakern.api import Op
from portakern.core.backend import Backend
from portakern.spec import Spec

class PyTorchArray(Protocol):
    """Whatever has this attribute is an array of PyTorch."""

    @property
    def requires_grad(self) -> Any: ...

class JAXArray(Protocol):
    """Whatever has this attribute is an array of JAX."""

    @property
    def sharding(self) -> Any: ...

Array = TypeVar("Array", bound=PyTorchArray | JAXArray)
T = TypeVar("T", covariant=True)

class AddLayernormOut(NamedTuple, Generic[T]):
    y: T
    residual_out: T

class AddLayernormOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        residual: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        *,
        eps: float = 1e-05,
        overwrite: Literal["residual"] | Iterable[Literal["residual"]] | None = None,
    ) -> AddLayernormOut[Array]:
        """residual_out = x + residual and y = layernorm(residual_out): what a transformer does between two of its
        layers.

        The sum is rounded to its dtype, and what is normed is that, as where a model adds first; all else as in
        layernorm.

        Args:
          x: (*batch, n), what a layer gave; residual: of that shape, what went past it.
          weight, bias, eps: as in layernorm.

        Returns:
          y: the shape and dtype of x; residual_out: the sum, which goes past the next layer, of the same. In the sum
          infinities of opposite sign make NaN; what NaN and infinities of the sum make of y, layernorm says.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        residual: NDArray[Any],
        weight: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        eps: float = 1e-05,
        overwrite: Literal["residual"] | Iterable[Literal["residual"]] | None = None,
    ) -> AddLayernormOut[NDArray[Any]]: ...

class AddLayernormVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weight: T | None
    d_bias: T | None

class AddLayernormVjpOp(Op):
    @overload
    def __call__(
        self,
        residual_out: Array,
        d_y: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        d_residual_out: Array | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> AddLayernormVjpOut[Array]:
        """d_x = d_residual_out + the d_x of layernorm_vjp at residual_out, and its d_weight and d_bias, in float32.

        Args:
          residual_out: (*batch, n), the sum that add_layernorm returned; d_y, d_residual_out: the cotangents of what it
            returned, the second None for zeros.
          weight, bias, eps: as in add_layernorm.

        Returns:
          d_x: the gradient with respect to x and to residual, which are one, of the shape and dtype of residual_out;
          d_weight, d_bias: as in layernorm_vjp.
        """
    @overload
    def __call__(
        self,
        residual_out: Array,
        d_y: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        d_residual_out: Array | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias"]] | None,
    ) -> AddLayernormVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        residual_out: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        d_residual_out: NDArray[Any] | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> AddLayernormVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        residual_out: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        d_residual_out: NDArray[Any] | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias"]] | None,
    ) -> AddLayernormVjpOut[NDArray[Any] | None]: ...

class AddRmsnormOut(NamedTuple, Generic[T]):
    y: T
    residual_out: T

class AddRmsnormOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        residual: Array,
        weight: Array | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        overwrite: Literal["residual"] | Iterable[Literal["residual"]] | None = None,
    ) -> AddRmsnormOut[Array]:
        """residual_out = x + residual and y = rmsnorm(residual_out): what a transformer does between two of its layers.

        The sum is rounded to its dtype, and what is normed is that, as where a model adds first; all else as in
        rmsnorm.

        Args:
          x: (*batch, n), what a layer gave; residual: of that shape, what went past it.
          weight, eps, rounding: as in rmsnorm.

        Returns:
          y: the shape and dtype of x; residual_out: the sum, which goes past the next layer, of the same. In the sum
          infinities of opposite sign make NaN; what NaN and infinities of the sum make of y, rmsnorm says.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        residual: NDArray[Any],
        weight: NDArray[Any] | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        overwrite: Literal["residual"] | Iterable[Literal["residual"]] | None = None,
    ) -> AddRmsnormOut[NDArray[Any]]: ...

class AddRmsnormQuantizeOut(NamedTuple, Generic[T]):
    q: T
    scale: T
    residual_out: T

class AddRmsnormQuantizeOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        residual: Array,
        weight: Array | None = None,
        *,
        width: int = 128,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
        overwrite: Literal["residual"] | Iterable[Literal["residual"]] | None = None,
    ) -> AddRmsnormQuantizeOut[Array]:
        """residual_out = x + residual, and the codes and scales of rmsnorm(residual_out), as rmsnorm_quantize gives
        them.

        The sum is rounded to its dtype, and what is normed is that, as in add_rmsnorm; the norm is quantised from
        float32.

        Args:
          x: (*batch, n), what a layer gave; residual: of that shape, what went past it.
          weight, width, eps, rounding, to, scales, scale_ub, scale_floor: as in rmsnorm_quantize.

        Returns:
          q, scale: as in rmsnorm_quantize; residual_out: the sum, of the shape and dtype of x, as in add_rmsnorm.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        residual: NDArray[Any],
        weight: NDArray[Any] | None = None,
        *,
        width: int = 128,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
        overwrite: Literal["residual"] | Iterable[Literal["residual"]] | None = None,
    ) -> AddRmsnormQuantizeOut[NDArray[Any]]: ...

class AddRmsnormVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weight: T | None

class AddRmsnormVjpOp(Op):
    @overload
    def __call__(
        self,
        residual_out: Array,
        d_y: Array,
        weight: Array | None = None,
        d_residual_out: Array | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> AddRmsnormVjpOut[Array]:
        """d_x = d_residual_out + the d_x of rmsnorm_vjp at residual_out, and its d_weight, in float32 (float64 for
        float64).

        Args:
          residual_out: (*batch, n), the sum that add_rmsnorm returned; d_y, d_residual_out: the cotangents of what it
            returned, the second None for zeros.
          weight, eps, rounding: as in add_rmsnorm.

        Returns:
          d_x: the gradient with respect to x and to residual, which are one, of the shape and dtype of residual_out;
          d_weight: as in rmsnorm_vjp.
        """
    @overload
    def __call__(
        self,
        residual_out: Array,
        d_y: Array,
        weight: Array | None = None,
        d_residual_out: Array | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight"]] | None,
    ) -> AddRmsnormVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        residual_out: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        d_residual_out: NDArray[Any] | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> AddRmsnormVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        residual_out: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        d_residual_out: NDArray[Any] | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight"]] | None,
    ) -> AddRmsnormVjpOut[NDArray[Any] | None]: ...

class AttentionOut(NamedTuple, Generic[T]):
    o: T
    lse: T

class AttentionOp(Op):
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None = None,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[False] = False,
        q_start: int | None = None,
        kv_start: int | None = None,
        out_dtype: Any | None = None,
    ) -> Array:
        """o = softmax(softcap(scale q k^T) - slope |distance| + bias, masked) v, one row at a time and never storing
        the
        scores.

        The algorithm is FlashAttention-2's forward pass (Dao 2023, algorithm 1). A sink is a learned score of each
        query
        head (Agarwal et al. 2025, gpt-oss, section 2): the softmax's denominator of each row has exp(sink) besides, so
        that
        a row may give its keys a weight of less than 1 in all. It is one more key, whose score is the sink, neither
        scaled
        nor capped, and whose value is 0; every row sees it, whatever masks say.

        Args:
          q: (batch, q_len, kv_heads*group, d). Query head h reads key head h // group.
          k: (batch, kv_len, kv_heads, d); v: (batch, kv_len, kv_heads, dv).
          bias: added to the scaled scores; (batch, heads, q_len, kv_len), where the first three may be 1; q's dtype or
            float32. -inf masks the pair.
          q_segment_ids, kv_segment_ids: (batch, q_len), (batch, kv_len): a pair is allowed where they are equal. Both
            or
            neither.
          sinks: (kv_heads*group,): a logit of each query head; q's dtype or float32. -inf is none, to the bit. inf and
            NaN
            make all rows of their head NaN, o and lse, as a score of inf does.
          alibi_slopes: (kv_heads*group,), float32: of each query head, attention with linear biases (Press, Smith and
            Lewis
            2022). The score of query i and key j, softcapped, is less by slope |i + kv_len - q_len - j| before bias is
            added: distances count from the last query at the last key, as the masks do, and on either side. A slope of
              0
            changes no bit. An infinite slope times a distance of 0 is NaN. No array has the products, and nothing is
              their
            gradient: what asks for that of the slopes is refused.
          is_causal: query i sees keys up to i + kv_len - q_len (aligned at the bottom right: the last query sees every
            key).
          window: (left, right): query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right; None on
            a
            side is unbounded.
          q_start, kv_start: where the first query and the first key stand in a whole of which these are parts: query i
            at
            q_start + i, key j at kv_start + j. The causal mask, the window and slopes then compare these places, which
              is
            i + q_start - kv_start for i + kv_len - q_len above. kv_start None is 0, and q_start None the bottom-right
            alignment; kv_start alone is refused. Without a causal mask, a window and slopes they change nothing.
          out_dtype: dtype of o: "float32", as parts want it that are merged and rounded once; None: q's.
          scale: None is 1/sqrt(d).
          softcap: c: scores become c tanh(s/c), before the bias.
          precision: for float32 operands, as in matmul, but that "ieee" may err by 8 units of roundoff in a product, as
            three products of 10 bits do; so either has tf32's range.
          return_lse: also return the log-sum-exp.

        Returns:
          o: (batch, q_len, kv_heads*group, dv), q's dtype or out_dtype; with return_lse also lse: (batch,
            kv_heads*group,
          q_len), float32, natural log, of the softmax's denominator, a sink included. A row that may see no key is
            zeros,
          its lse the sink, or -inf without one.
        """
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None = None,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[True],
        q_start: int | None = None,
        kv_start: int | None = None,
        out_dtype: Any | None = None,
    ) -> AttentionOut[Array]: ...
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None = None,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: bool = False,
        q_start: int | None = None,
        kv_start: int | None = None,
        out_dtype: Any | None = None,
    ) -> Array | AttentionOut[Array]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        bias: NDArray[Any] | None = None,
        q_segment_ids: NDArray[Any] | None = None,
        kv_segment_ids: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[False] = False,
        q_start: int | None = None,
        kv_start: int | None = None,
        out_dtype: Any | None = None,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        bias: NDArray[Any] | None = None,
        q_segment_ids: NDArray[Any] | None = None,
        kv_segment_ids: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[True],
        q_start: int | None = None,
        kv_start: int | None = None,
        out_dtype: Any | None = None,
    ) -> AttentionOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        bias: NDArray[Any] | None = None,
        q_segment_ids: NDArray[Any] | None = None,
        kv_segment_ids: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: bool = False,
        q_start: int | None = None,
        kv_start: int | None = None,
        out_dtype: Any | None = None,
    ) -> NDArray[Any] | AttentionOut[NDArray[Any]]: ...

class AttentionGradients(NamedTuple, Generic[T]):
    d_q: T
    d_k: T
    d_v: T
    d_bias: T | None
    d_sinks: T | None

class AttentionVjpOp(Op):
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        d_o: Array,
        bias: Array | None = None,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        d_lse: Array | None = None,
        lse_low: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        q_start: int | None = None,
        kv_start: int | None = None,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> AttentionGradients[Array]:
        """Gradients of attention from its own results, the scores recomputed and never stored.

        The algorithm is FlashAttention-2's backward pass (Dao 2023, algorithm 2). At each pair of a query and a key,
        with c
        the softcap, and a the slope of the head times the distance, or 0 without alibi_slopes:

            t = tanh(scale q k^T / c), s = c t - a + bias;  without a softcap s = scale q k^T - a + bias
            P = exp(min(s - lse - lse_low, 0)),  Delta = rowsum(d_o * o) - d_lse,  dS = P (d_o v^T - Delta)
            D = dS (1 - t^2);  without a softcap D = dS

        and from these

            d_q = scale D k
            d_k = scale D^T q and d_v = P^T d_o, summed over the query heads of a key head
            d_bias = dS, summed over the axes that bias broadcasts
            d_sinks = -exp(min(sink - lse - lse_low, 0)) Delta, summed over batch entries and queries

        The other gradients know of sinks by lse alone. At pairs that causal, window or segments mask, P and dS are 0,
        whatever lse, d_o, v and the rest hold there: select after the arithmetic. A row with lse = -inf saw no key and
        has no sink: its P is 0. Where bias = -inf, P is 0 as exp gives it. o, lse and lse_low are taken as they are,
        rounded. No P exceeds 1, however far rounding moves a score above lse: where scores are large that is by whole
        numbers. Nothing is promised of a pair whose score is above lse by more than that: it is the lse of other
        scores.
        NaN and inf reach what they meet at allowed pairs. 0 in P or D times a q, k or d_o that is NaN or inf, inside a
        tile, may be NaN; beyond an extent never.

        Args:
          q, k, v, bias, q_segment_ids, kv_segment_ids, sinks, alibi_slopes, is_causal, window, scale, softcap,
            precision,
            q_start, kv_start: as in attention. Rows with lse = -inf add nothing to d_sinks. Slopes have no gradient. Of
              a
            part of the keys o, lse and lse_low are those of the whole: d_q is then the part's share of a sum, d_k and
              d_v
            are the whole's rows.
          o, lse, lse_low: what attention returned; lse_low None is 0.
          d_o, d_lse: cotangents of o and lse (float32); d_lse None is 0. o and d_o have q's dtype or float32, each its
            own.
            d_o of float32 beside 16-bit inputs may be rounded to their dtype for products, and is not for Delta.

        Returns:
          d_q, d_k, d_v, d_bias, d_sinks: the shapes and dtypes of q, k, v, bias and sinks. A row that saw no key has no
          gradient and leaves none but d_sinks. For 16-bit inputs P and D are rounded to nearest
          before their products, as P is in attention.
        """
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        d_o: Array,
        bias: Array | None = None,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        d_lse: Array | None = None,
        lse_low: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        q_start: int | None = None,
        kv_start: int | None = None,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_q", "d_k", "d_v", "d_bias", "d_sinks"]] | None,
    ) -> AttentionGradients[Array | None]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        o: NDArray[Any],
        lse: NDArray[Any],
        d_o: NDArray[Any],
        bias: NDArray[Any] | None = None,
        q_segment_ids: NDArray[Any] | None = None,
        kv_segment_ids: NDArray[Any] | None = None,
        d_lse: NDArray[Any] | None = None,
        lse_low: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        q_start: int | None = None,
        kv_start: int | None = None,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> AttentionGradients[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        o: NDArray[Any],
        lse: NDArray[Any],
        d_o: NDArray[Any],
        bias: NDArray[Any] | None = None,
        q_segment_ids: NDArray[Any] | None = None,
        kv_segment_ids: NDArray[Any] | None = None,
        d_lse: NDArray[Any] | None = None,
        lse_low: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        q_start: int | None = None,
        kv_start: int | None = None,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_q", "d_k", "d_v", "d_bias", "d_sinks"]] | None,
    ) -> AttentionGradients[NDArray[Any] | None]: ...

class CausalConv1dOut(NamedTuple, Generic[T]):
    y: T
    final_state: T

class CausalConv1dOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        initial_state: Array | None = None,
        segment_ids: Array | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        return_final_state: Literal[False] = False,
    ) -> Array:
        """y[t] = f(bias + sum over j < width of weight[j] x[t - past + j]) for each channel, past = width - 1, in
        float32.

        The last tap is that of the output's own input. What lies before the first input is the initial state, or 0, and
        0
        is multiplied as any other number. In float64 for float64, and rounded once, at the end. f is silu(z) = z / (1 +
        exp(-z)), or "none".

        The convolution is that of Mamba, Gu and Dao 2023, "Mamba: linear-time sequence modeling with selective state
        spaces", section 3.4, and of gated delta networks; arguments and states are those of the package causal_conv1d.

        Args:
          x: (batch, length, channels), any strides: the view x.transpose(1, 2) of an array that keeps channels first
            costs
            nothing.
          weight: (channels, width), 2 <= width <= 16, x's dtype or float32; bias: (channels,), likewise.
          initial_state: (batch, channels, past), the inputs before the first, the latest last.
          segment_ids: (batch, length). Inputs of another segment than the output's count as 0. The initial state is of
            the
            first input's segment.
          return_final_state: whether the state after the last input comes with y.

        Returns:
          y: the shape of x, contiguous. final_state: (batch, channels, past), the last inputs, which are the initial
            state
          of what follows in the last segment: 0 for inputs of another. Of fewer inputs than past it begins with the end
            of
          the initial state. length = 0 is refused. NaN
          and infinities go where plain arithmetic leads them, and 0 times infinity is NaN.
        """
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        initial_state: Array | None = None,
        segment_ids: Array | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        return_final_state: Literal[True],
    ) -> CausalConv1dOut[Array]: ...
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        initial_state: Array | None = None,
        segment_ids: Array | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        return_final_state: bool = False,
    ) -> Array | CausalConv1dOut[Array]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        initial_state: NDArray[Any] | None = None,
        segment_ids: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        return_final_state: Literal[False] = False,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        initial_state: NDArray[Any] | None = None,
        segment_ids: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        return_final_state: Literal[True],
    ) -> CausalConv1dOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        initial_state: NDArray[Any] | None = None,
        segment_ids: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        return_final_state: bool = False,
    ) -> NDArray[Any] | CausalConv1dOut[NDArray[Any]]: ...

class CausalConv1dVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weight: T
    d_bias: T | None
    d_initial_state: T | None

class CausalConv1dVjpOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        d_y: Array,
        bias: Array | None = None,
        initial_state: Array | None = None,
        segment_ids: Array | None = None,
        d_final_state: Array | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> CausalConv1dVjpOut[Array]:
        """With d_z = d_y f'(z), of a z that is computed again, and X the inputs, the initial state first:

        d_X[e] = sum over j of weight[j] d_z[e - j], which is d_initial_state and then d_x, d_weight[j] = sum of d_z[t]
        X[t + j] and d_bias = sum of d_z over all samples and positions. In float32 (float64 for float64), rounded once.

        Args:
          x, weight, bias, initial_state, segment_ids, activation: what causal_conv1d was given.
          d_y: (batch, length, channels), the cotangent of its y; d_final_state: (batch, channels, past), that of the
            state
            after the last input, which is added to the gradients of the inputs that it holds. None is 0.

        Returns:
          d_x, d_weight, d_bias, d_initial_state: the shape and dtype of what they are gradients of, None where that was
            not
          given. What lies beyond the sequence, or in another segment, counts as 0 and is multiplied as any other
            number.
        """
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        d_y: Array,
        bias: Array | None = None,
        initial_state: Array | None = None,
        segment_ids: Array | None = None,
        d_final_state: Array | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias", "d_initial_state"]] | None,
    ) -> CausalConv1dVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        d_y: NDArray[Any],
        bias: NDArray[Any] | None = None,
        initial_state: NDArray[Any] | None = None,
        segment_ids: NDArray[Any] | None = None,
        d_final_state: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> CausalConv1dVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        d_y: NDArray[Any],
        bias: NDArray[Any] | None = None,
        initial_state: NDArray[Any] | None = None,
        segment_ids: NDArray[Any] | None = None,
        d_final_state: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "silu"] = "none",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias", "d_initial_state"]] | None,
    ) -> CausalConv1dVjpOut[NDArray[Any] | None]: ...

class CrossEntropyOut(NamedTuple, Generic[T]):
    loss: T
    lse: T

class CrossEntropyOp(Op):
    @overload
    def __call__(
        self,
        logits: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: Literal[False] = False,
    ) -> Array:
        """loss = log l + (1 - e) (m - x_t) + e (m - mean x) + z lse^2 of each row x of logits, t its label, in float32.

        With m = max x, or 0 where that is infinite, l = sum exp(x - m), lse = m + log l, e = label_smoothing and z =
        z_loss; in float64 for float64. A term whose factor e or z is 0 is left out. The sources are Szegedy et al.
        2016,
        "Rethinking the inception architecture", section 7, for e, and de Brebisson and Vincent 2016, "The z-loss", in
        the
        form of Chowdhery et al. 2022, "PaLM", section 5, for z.

        Args:
          logits: (*batch, n), n classes a row; labels: (*batch), int32 or int64, the class of each row.
          ignore_index: a label whose row takes no part: whatever it holds, its loss, its lse and its gradients are 0.
          label_smoothing: the share of the target that all classes divide evenly, from 0 to 1.
          z_loss: the weight of lse^2, >= 0, which keeps logits near 0.
          return_lse: whether lse comes with the loss.

        Returns:
          loss: (*batch), float32 whatever the logits are (float64 for float64), not reduced; lse: of the same. NaN and
          infinities of a row reach its own loss by plain arithmetic: a -inf that is not the label adds nothing where e
            is
          0, one that is gives inf. What a label outside the classes gives is not promised; nothing is read out of
            bounds.
        """
    @overload
    def __call__(
        self,
        logits: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: Literal[True],
    ) -> CrossEntropyOut[Array]: ...
    @overload
    def __call__(
        self,
        logits: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: bool = False,
    ) -> Array | CrossEntropyOut[Array]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: Literal[False] = False,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: Literal[True],
    ) -> CrossEntropyOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_lse: bool = False,
    ) -> NDArray[Any] | CrossEntropyOut[NDArray[Any]]: ...

class CrossEntropyVjpOut(NamedTuple, Generic[T]):
    d_logits: T

class CrossEntropyVjpOp(Op):
    @overload
    def __call__(
        self,
        logits: Array,
        labels: Array,
        lse: Array,
        d_loss: Array,
        lse_low: Array | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        first_class: int = 0,
        classes: int | None = None,
        wants: None = None,
        overwrite: Literal["logits"] | Iterable[Literal["logits"]] | None = None,
    ) -> CrossEntropyVjpOut[Array]:
        """d_logits_j = d_loss [p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n], p = exp(min(logits - lse - lse_low, 0)).

        With t the label, e = label_smoothing and z = z_loss; in float32, in float64 for float64.

        Of a part of the classes the gradient needs no other part, given lse of all: the logits are those of n classes
        from
        ``first_class`` on, of ``classes`` in all, for which n above then stands.

        Args:
          logits, labels, ignore_index, label_smoothing, z_loss: what cross_entropy was given.
          first_class, classes: which of all classes the logits are of; classes None: they are the last. Labels, lse and
            lse_low are those of all classes.
          lse, lse_low: (*batch), what it found, lse_low None being 0; d_loss: (*batch), the cotangent of its loss.

        Returns:
          d_logits: the shape and dtype of logits, 0 in rows that are ignored. An infinite lse makes p 0, and NaN beside
            a
          logit of the same infinity.
        """
    @overload
    def __call__(
        self,
        logits: Array,
        labels: Array,
        lse: Array,
        d_loss: Array,
        lse_low: Array | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        first_class: int = 0,
        classes: int | None = None,
        wants: Iterable[Literal["d_logits"]] | None,
        overwrite: Literal["logits"] | Iterable[Literal["logits"]] | None = None,
    ) -> CrossEntropyVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        labels: NDArray[Any],
        lse: NDArray[Any],
        d_loss: NDArray[Any],
        lse_low: NDArray[Any] | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        first_class: int = 0,
        classes: int | None = None,
        wants: None = None,
        overwrite: Literal["logits"] | Iterable[Literal["logits"]] | None = None,
    ) -> CrossEntropyVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        labels: NDArray[Any],
        lse: NDArray[Any],
        d_loss: NDArray[Any],
        lse_low: NDArray[Any] | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        first_class: int = 0,
        classes: int | None = None,
        wants: Iterable[Literal["d_logits"]] | None,
        overwrite: Literal["logits"] | Iterable[Literal["logits"]] | None = None,
    ) -> CrossEntropyVjpOut[NDArray[Any] | None]: ...

class EmbeddingOp(Op):
    @overload
    def __call__(self, weight: Array, ids: Array, *, padding_index: int | None = None) -> Array:
        """y[t] = weight[ids[t]], to the bit: a table's rows by their numbers.

        Args:
          weight: (rows, d), the table, of any strides: a head's (d, rows) weights are given as a transposed view.
          ids: (*batch), int32 or int64, the row that each token takes.
          padding_index: a row, from 0 to rows - 1, whose gradient is 0, as of ``torch.nn.functional.embedding``;
            forward it
            is a row as any other. None: no row.

        Returns:
          y: (*batch, d), with the bits of the rows, NaN and infinities too; a subnormal number is one of them. An id
            that
          is no row, a negative one too, gives a row of NaN, and nothing is read out of bounds: kernels do not read ids
            to
          refuse them. PyTorch's function raises an error on a CPU, and on a GPU ends the process; JAX's index gives NaN
          beyond the end, and counts negative ids from it.
        """
    @overload
    def __call__(
        self,
        weight: NDArray[Any],
        ids: NDArray[Any],
        *,
        padding_index: int | None = None,
    ) -> NDArray[Any]: ...

class EmbeddingVjpOut(NamedTuple, Generic[T]):
    d_weight: T

class EmbeddingVjpOp(Op):
    @overload
    def __call__(
        self,
        weight: Array,
        ids: Array,
        d_y: Array,
        *,
        padding_index: int | None = None,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> EmbeddingVjpOut[Array]:
        """d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r, in float32 (float64 for float64), rounded
        once.

        The bits of a row depend on the cotangents of its own tokens in their order, and on nothing else: where they
        stand
        among others, and what those name, changes none.

        Args:
          weight: (rows, d), of which the extents alone are read; ids: (*batch), as in embedding.
          d_y: (*batch, d), the cotangent of y, of any strides.
          padding_index: a row whose gradient is 0, whatever its tokens' cotangents hold; None: no row.

        Returns:
          d_weight: (rows, d). A row that no token names is exact zeros, and so is the padding row. The cotangent of a
            token
          whose id is no row, a negative one too, reaches nothing.
        """
    @overload
    def __call__(
        self,
        weight: Array,
        ids: Array,
        d_y: Array,
        *,
        padding_index: int | None = None,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_weight"]] | None,
    ) -> EmbeddingVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        weight: NDArray[Any],
        ids: NDArray[Any],
        d_y: NDArray[Any],
        *,
        padding_index: int | None = None,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> EmbeddingVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        weight: NDArray[Any],
        ids: NDArray[Any],
        d_y: NDArray[Any],
        *,
        padding_index: int | None = None,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_weight"]] | None,
    ) -> EmbeddingVjpOut[NDArray[Any] | None]: ...

class GegluOp(Op):
    @overload
    def __call__(self, gate: Array, up: Array, *, approximate: Literal["none", "tanh"] = "none") -> Array:
        """y = gate P(gate) up, element by element, in float32 (float64 for float64), P the share of the gate that is
        open.

        P(g) = (1 + erf(g / sqrt 2)) / 2, or with approximate="tanh" s(t) = 1 / (1 + exp(-t)) of t = 2 sqrt(2 / pi) (g +
        0.044715 g^3), which is (1 + tanh(t / 2)) / 2. The options are those of ``torch.nn.functional.gelu``. The
        sources
        are Shazeer 2020, "GLU variants improve transformer", equation 5, and Hendrycks and Gimpel 2016, "Gaussian error
        linear units", for both forms.

        Args:
          gate: any shape, contiguous or not: such as one half of a projection; up: of that shape.
          approximate: which form P has.

        Returns:
          y: the shape and dtype of gate. An infinity or NaN reaches its own element alone, by plain arithmetic:
            gelu(inf)
          is inf, gelu(-inf) is NaN, and an infinite up beside gelu(0) gives NaN. P is promised to a few 2^-24 of 1 and
            not
          of itself: 1 + erf, and 1 + tanh where that is added, have lost what is left of it below -5.
        """
    @overload
    def __call__(
        self,
        gate: NDArray[Any],
        up: NDArray[Any],
        *,
        approximate: Literal["none", "tanh"] = "none",
    ) -> NDArray[Any]: ...

class GegluVjpOut(NamedTuple, Generic[T]):
    d_gate: T
    d_up: T

class GegluVjpOp(Op):
    @overload
    def __call__(
        self,
        gate: Array,
        up: Array,
        d_y: Array,
        *,
        approximate: Literal["none", "tanh"] = "none",
        wants: None = None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> GegluVjpOut[Array]:
        """d_gate = d_y up D(gate) and d_up = d_y gate P(gate), with D the slope of g P(g), element by element.

        P as in geglu; D(g) = P(g) + g exp(-g^2 / 2) / sqrt(2 pi), or of the tanh form s (1 + g t' (1 - s)) with s =
        P(g)
        and t' = 2 sqrt(2 / pi) (1 + 3 0.044715 g^2). In float32 (float64 for float64).

        Args:
          gate, up, approximate: what geglu was given; d_y: the cotangent of what it returned. All of one shape.

        Returns:
          d_gate, d_up: the shape and dtype of gate. The slope at an infinite gate is its limit, 1 or 0; d_up is there
            what
          geglu gives with d_y for up.
        """
    @overload
    def __call__(
        self,
        gate: Array,
        up: Array,
        d_y: Array,
        *,
        approximate: Literal["none", "tanh"] = "none",
        wants: Iterable[Literal["d_gate", "d_up"]] | None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> GegluVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        gate: NDArray[Any],
        up: NDArray[Any],
        d_y: NDArray[Any],
        *,
        approximate: Literal["none", "tanh"] = "none",
        wants: None = None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> GegluVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        gate: NDArray[Any],
        up: NDArray[Any],
        d_y: NDArray[Any],
        *,
        approximate: Literal["none", "tanh"] = "none",
        wants: Iterable[Literal["d_gate", "d_up"]] | None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> GegluVjpOut[NDArray[Any] | None]: ...

class GroupedMatmulOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        group_ends: Array,
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        out_dtype: Any | None = None,
    ) -> Array:
        """c = a b_g for the rows of each group g, accumulated in float32 (float64 for float64) and rounded once.

        Group g has the rows from group_ends[g - 1], of the first group from 0, up to group_ends[g]. A row's result is
        that
        of ``matmul`` on it and its group's matrix, and its bits depend on nothing else.

        Groups are given by where they end, as ``offs`` of torch's ``grouped_mm`` gives them, and not by their sizes, as
        in
        ``jax.lax.ragged_dot``: a program finds the group of a row by ends as they are, while sizes would have to be
        summed
        on the device before. The ends of sizes are ``cumsum(sizes)``.

        Args:
          a: (rows, k), the rows of a group beside each other, group after group.
          b: (groups, k, n), a matrix for each group, of any strides: weights that lie as (groups, n, k) are given as a
            transposed view.
          group_ends: (groups,), which rise and may repeat (a group without rows), within 0 and rows. Others are the
            caller's mistake: no result is promised, and nothing is read or written out of bounds.
          precision: of products of float32, as in matmul.
          out_dtype: dtype of c; None: that of a and b.

        Returns:
          c: (rows, n). Rows from the last end on belong to no group: zeros, whatever a holds there. NaN and infinities
            stay
          in their row of a, and in their group's rows of b. k = 0 gives zeros.
        """
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        group_ends: NDArray[Any],
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        out_dtype: Any | None = None,
    ) -> NDArray[Any]: ...

class GroupedMatmulVjpOut(NamedTuple, Generic[T]):
    d_a: T
    d_b: T

class GroupedMatmulVjpOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        group_ends: Array,
        d_c: Array,
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> GroupedMatmulVjpOut[Array]:
        """d_a = d_c b_g^T and d_b_g = a_g^T d_c_g of each group g, accumulated in float32 and rounded once.

        The gradients of a group have the same bits alone and among any others: the sum over its rows begins at its
        first
        one, and has one order.

        Args:
          a: (rows, k); b: (groups, k, n); group_ends: (groups,), as in grouped_matmul.
          d_c: (rows, n), the cotangent of c, of any float dtype. A product of two dtypes is taken in float32, or in
            float64
            where one of them is.
          precision: for float32 products, as in matmul.

        Returns:
          d_a: (rows, k), zeros in rows of no group; d_b: (groups, k, n), zeros for a group without rows. What a and d_c
          hold in rows of no group reaches neither.
        """
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        group_ends: Array,
        d_c: Array,
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_a", "d_b"]] | None,
    ) -> GroupedMatmulVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        group_ends: NDArray[Any],
        d_c: NDArray[Any],
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> GroupedMatmulVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        group_ends: NDArray[Any],
        d_c: NDArray[Any],
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_a", "d_b"]] | None,
    ) -> GroupedMatmulVjpOut[NDArray[Any] | None]: ...

class KvAppendOut(NamedTuple, Generic[T]):
    k_out: T
    v_out: T

class KvAppendOp(Op):
    @overload
    def __call__(
        self,
        k: Array,
        v: Array,
        k_pages: Array,
        v_pages: Array,
        slots: Array,
        cos: Array | None = None,
        sin: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        *,
        interleaved: bool = False,
        overwrite: Literal["k_pages", "v_pages"] | Iterable[Literal["k_pages", "v_pages"]] | None = None,
    ) -> KvAppendOut[Array]:
        """The keys and values of new tokens, written into the pages of a cache.

        With ``overwrite=("k_pages", "v_pages")`` the cache itself is written to, and of it the slots of the tokens
        alone:
        what a server calls. Without, the results are new arrays: the cache is copied.

        With cos and sin keys are turned on their way, as rope turns them, and rounded once, to the dtype of their
        pages.

        Args:
          k: (tokens, kv_heads, d); v: (tokens, kv_heads, dv), of any strides, such as parts of one product.
          k_pages: (pages, page_size, kv_heads, d); v_pages: (pages, page_size, kv_heads, dv). Each has k's dtype, or
            float8_e4m3fn or float8_e5m2.
          slots: (tokens), where each token goes: its page * page_size + its place in the page, as in vLLM's
            slot_mapping.
            A token with a negative slot is skipped, as padding is. No slot may be two tokens', or beyond the cache;
            kernels do not read slots to find out: a token beyond the cache is skipped then, and of two tokens with one
            slot either may be there.
          cos, sin: (tokens, P), of k's dtype or float32: the tables of rope, whose row is that of the token and so says
            its
            position. P is d / 2 or less, one column a pair. None: keys are written as they are.
          k_scale, v_scale: (kv_heads,), float32, from 2^-126 to 2^126: keys, or values, of a head are divided by its
            scale,
            and what is in the pages is multiplied by it where paged_attention reads them. None is 1, to the bit.
          interleaved: which numbers of a head are a pair, as in rope.

        Returns:
          k_out, v_out: the cache, of its own dtype, with the rows of the tokens. Of pages of k's dtype they are the
            bits of
          k and v, but for pairs that are turned and heads that are scaled. Pages of 8 bits hold what is nearest to x /
          scale, ties to even, and the largest number of that sign where x / scale is beyond it (448 of float8_e4m3fn,
            57344
          of float8_e5m2), as of an infinity; NaN is NaN. All other slots have the bits that they had, NaN and
            infinities
          too.
        """
    @overload
    def __call__(
        self,
        k: NDArray[Any],
        v: NDArray[Any],
        k_pages: NDArray[Any],
        v_pages: NDArray[Any],
        slots: NDArray[Any],
        cos: NDArray[Any] | None = None,
        sin: NDArray[Any] | None = None,
        k_scale: NDArray[Any] | None = None,
        v_scale: NDArray[Any] | None = None,
        *,
        interleaved: bool = False,
        overwrite: Literal["k_pages", "v_pages"] | Iterable[Literal["k_pages", "v_pages"]] | None = None,
    ) -> KvAppendOut[NDArray[Any]]: ...

class LayernormOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        *,
        eps: float = 1e-05,
    ) -> Array:
        """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis, var the mean squared deviation.

        The source is Ba, Kiros, Hinton 2016, equations 3 and 4.

        Args:
          x: (*batch, n).
          weight, bias: (n,), x's dtype or float32; None is 1 and 0.
          eps: added to the variance, >= 0.

        Returns:
          y: the shape and dtype of x. A row that holds inf or NaN is all NaN.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        eps: float = 1e-05,
    ) -> NDArray[Any]: ...

class LayernormVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weight: T | None
    d_bias: T | None

class LayernormVjpOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        d_y: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> LayernormVjpOut[Array]:
        """With r = (var + eps)^-1/2, xh = (x - mean) r and h = d_y weight, in float32 (float64 for float64):

        d_x = r (h - mean h - xh mean(h xh)), d_weight = sum of d_y xh and d_bias = sum of d_y, both over all rows.

        Args:
          x: (*batch, n), as in layernorm; d_y: (*batch, n), the cotangent of its y.
          weight, bias: (n,), x's dtype or float32, as in layernorm. The values of bias are not read: it says that
            d_bias
            exists, and its dtype.
          eps: as in layernorm.

        Returns:
          d_x: the shape and dtype of x; d_weight, d_bias: those of weight and bias, None where that was not given.
          An inf or NaN in a row of x makes its row of d_x and all of d_weight NaN; a NaN in d_y its row of d_x and its
          column of d_weight and d_bias.
        """
    @overload
    def __call__(
        self,
        x: Array,
        d_y: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias"]] | None,
    ) -> LayernormVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> LayernormVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        eps: float = 1e-05,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias"]] | None,
    ) -> LayernormVjpOut[NDArray[Any] | None]: ...

class LinearOut(NamedTuple, Generic[T]):
    y: T
    pre: T

class LinearOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        residual: Array | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        return_pre: Literal[False] = False,
    ) -> Array:
        """y = f(z) + residual with z = x weight^T + bias, in float32 (float64 for float64), rounded once, at the end.

        The bias comes after the sum, and is rounded with it once; so does the residual with f(z).

        f is the activation: relu(z) = max(z, 0), silu(z) = z / (1 + exp(-z)), gelu(z) = z (1 + erf(z / sqrt 2)) / 2,
        gelu_tanh its tanh form, as swiglu and geglu have them; "none" is z itself. The sum over k, what bias adds, f
        and
        what residual adds are float32: nothing is rounded to x's dtype between them, as it is where each is a function
        of
        its own.

        For its gradient one array is kept beside x and weight: z as it was before the activation, ``pre``, in x's
        dtype.
        Where there is no activation nothing is kept, and the forward call does not make it. The gradient of the
        residual is
        the cotangent of y itself, which is passed on. See linear_vjp.

        The sources are Hendrycks and Gimpel 2016, "Gaussian error linear units", for gelu, and Elfwing et al. 2018,
        "Sigmoid-weighted linear units", for silu.

        Args:
          x: (*batch, k); weight: (n, k), a row for each output, as ``torch.nn.Linear`` has it; bias: (n,); residual:
            (*batch, n), added last. All of one dtype.
          precision: of products of float32, as in matmul.
          return_pre: whether z comes with y.

        Returns:
          y, pre: (*batch, n), x's dtype. k = 0 is refused. NaN and infinities go where plain arithmetic leads them: a
            NaN
          in a row of x makes its row NaN, gelu and silu of -inf are NaN (-inf 0), relu of it is 0.
        """
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        residual: Array | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        return_pre: Literal[True],
    ) -> LinearOut[Array]: ...
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        residual: Array | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        return_pre: bool = False,
    ) -> Array | LinearOut[Array]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        residual: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        return_pre: Literal[False] = False,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        residual: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        return_pre: Literal[True],
    ) -> LinearOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        bias: NDArray[Any] | None = None,
        residual: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        return_pre: bool = False,
    ) -> NDArray[Any] | LinearOut[NDArray[Any]]: ...

class LinearCrossEntropyOut(NamedTuple, Generic[T]):
    loss: T
    lse: T | None
    slope: T | None
    logit_gradients: T | None

class LinearCrossEntropyOp(Op):
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: Literal[False] = False,
        return_slope: Literal[False] = False,
        return_logit_gradients: Literal[False] = False,
    ) -> Array:
        """The cross_entropy of each row x = weight h of logits, h a row of hidden, in float32 (float64 for float64).

        Logits are sums in float32 that may be rounded to hidden's dtype, and so may b, below, each once. They are taken
        ``chunk_rows`` rows at a time, so that no more of them are ever in memory, unless b is kept; how many makes no
        difference to a row.

        The slope of a row is the gradient of its loss with respect to h,

            sum_j b_j weight_j        b_j = p_j (1 + 2 z lse) - (1 - e) [j = t] - e / n        p = exp(min(x - lse, 0))

        with t the label, e = label_smoothing and z = z_loss. It needs the logits of its row and no other's, so that it
        is
        taken where these are at hand, and the gradient needs no second look: it is slope times the loss's cotangent.
        The
        weight's gradient needs b of all rows. Where a call that is differentiated keeps b (``keep_logit_gradients``),
        in
        hidden's dtype, no product is taken twice; else logits and b are taken again, by a fourth product.

        The source is the fused linear cross entropy of Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of
        rows;
        for what the other gradient needs, see linear_cross_entropy_vjp.

        Args:
          hidden: (*batch, d); weight: (n, d), a row for each of n classes; labels: (*batch), int32 or int64.
          ignore_index, label_smoothing, z_loss: as in cross_entropy; the logits of an ignored row take no part.
          precision: of products of float32, as in matmul.
          keep_logit_gradients: whether b is kept for the gradient of weight: as many numbers of hidden's dtype as there
            are
            logits, from the forward pass to the backward pass. It changes nothing where nothing is differentiated.
          return_lse, return_slope, return_logit_gradients: whether lse, slope and b come with the loss.

        Returns:
          loss, lse: (*batch), float32 whatever hidden is (float64 for float64), as in cross_entropy; slope: (*batch,
            d),
          and logit_gradients: (*batch, n), which is b, of hidden's dtype. All are 0 in a row that is ignored, but that
            in
          slope 0 times an infinite weight is NaN: no product is left out. Nothing is promised of a row of which a logit
            may
          be beyond what hidden's dtype holds.
        """
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: Literal[True],
        return_slope: bool = False,
        return_logit_gradients: bool = False,
    ) -> LinearCrossEntropyOut[Array]: ...
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: bool = False,
        return_slope: Literal[True],
        return_logit_gradients: bool = False,
    ) -> LinearCrossEntropyOut[Array]: ...
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: bool = False,
        return_slope: bool = False,
        return_logit_gradients: Literal[True],
    ) -> LinearCrossEntropyOut[Array]: ...
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: bool = False,
        return_slope: bool = False,
        return_logit_gradients: bool = False,
    ) -> Array | LinearCrossEntropyOut[Array]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: Literal[False] = False,
        return_slope: Literal[False] = False,
        return_logit_gradients: Literal[False] = False,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: Literal[True],
        return_slope: bool = False,
        return_logit_gradients: bool = False,
    ) -> LinearCrossEntropyOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: bool = False,
        return_slope: Literal[True],
        return_logit_gradients: bool = False,
    ) -> LinearCrossEntropyOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: bool = False,
        return_slope: bool = False,
        return_logit_gradients: Literal[True],
    ) -> LinearCrossEntropyOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        return_lse: bool = False,
        return_slope: bool = False,
        return_logit_gradients: bool = False,
    ) -> NDArray[Any] | LinearCrossEntropyOut[NDArray[Any]]: ...

class LinearCrossEntropyVjpOut(NamedTuple, Generic[T]):
    d_hidden: T
    d_weight: T

class LinearCrossEntropyVjpOp(Op):
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        lse: Array,
        slope: Array,
        d_loss: Array,
        lse_low: Array | None = None,
        logit_gradients: Array | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        gradient_dtype: Any | None = None,
        wants: None = None,
        overwrite: Literal["slope"] | Iterable[Literal["slope"]] | None = None,
    ) -> LinearCrossEntropyVjpOut[Array]:
        """d_hidden = d_loss slope and d_weight_j = sum of d_loss b_j h over all rows h of hidden, b as in
        linear_cross_entropy.

        Logits are taken again, as there, of ``chunk_n`` classes at a time: what a class needs of the others is in lse,
        so
        that all rows go into one sum, which is rounded once. d_loss b may be rounded to hidden's dtype, once. Where b
        was
        kept it is met by d_loss h, which may be rounded to hidden's dtype, once: d fewer numbers a row than d_loss b
        has.

        Taking logits again where gradients need them is Cut Cross-Entropy's way (Wijmans et al. 2024, "Cut your losses
        in
        large-vocabulary language models", section 4), here for one of the two.

        Args:
          hidden, weight, labels, ignore_index, label_smoothing, z_loss, precision, keep_logit_gradients: what
            linear_cross_entropy was given.
          lse, slope, lse_low: what it found, lse_low None being 0; d_loss: (*batch), the cotangent of its loss.
          logit_gradients: (*batch, n), the b that it kept; None where it kept none. With it lse is not read.

        Returns:
          d_hidden: the shape and dtype of hidden, 0 in rows that are ignored; d_weight: those of weight, to which an
          ignored row adds 0 times what is in it, or in b where that was kept. Nothing is promised of d_weight where a
          logit, or d_loss b, may be beyond what hidden's dtype holds, or p beyond float32; where b was kept, where
            d_loss h
          may be.
        """
    @overload
    def __call__(
        self,
        hidden: Array,
        weight: Array,
        labels: Array,
        lse: Array,
        slope: Array,
        d_loss: Array,
        lse_low: Array | None = None,
        logit_gradients: Array | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_hidden", "d_weight"]] | None,
        overwrite: Literal["slope"] | Iterable[Literal["slope"]] | None = None,
    ) -> LinearCrossEntropyVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        lse: NDArray[Any],
        slope: NDArray[Any],
        d_loss: NDArray[Any],
        lse_low: NDArray[Any] | None = None,
        logit_gradients: NDArray[Any] | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        gradient_dtype: Any | None = None,
        wants: None = None,
        overwrite: Literal["slope"] | Iterable[Literal["slope"]] | None = None,
    ) -> LinearCrossEntropyVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        hidden: NDArray[Any],
        weight: NDArray[Any],
        labels: NDArray[Any],
        lse: NDArray[Any],
        slope: NDArray[Any],
        d_loss: NDArray[Any],
        lse_low: NDArray[Any] | None = None,
        logit_gradients: NDArray[Any] | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        precision: Literal["ieee", "tf32"] = "ieee",
        keep_logit_gradients: bool = False,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_hidden", "d_weight"]] | None,
        overwrite: Literal["slope"] | Iterable[Literal["slope"]] | None = None,
    ) -> LinearCrossEntropyVjpOut[NDArray[Any] | None]: ...

class LinearVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weight: T
    d_bias: T | None

class LinearVjpOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        d_y: Array,
        pre: Array | None = None,
        bias: Array | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> LinearVjpOut[Array]:
        """d_x = d_z weight, d_weight = d_z^T x and d_bias = the sum of d_z over all rows, with d_z = d_y f'(pre).

        Products and sums are float32 (float64 for float64) and rounded once; d_z may be rounded to x's dtype before
        them,
        once. f' of relu is 0 up to 0 and 1 beyond, and selects: what it leaves out is 0 whatever d_y holds. The
        gradient of
        the residual is d_y and is not computed.

        Args:
          x, weight, activation, precision: what linear was given.
          d_y: (*batch, n), the cotangent of its y.
          pre: (*batch, n), what it found; None where there is no activation, and d_z is d_y.
          bias: (n,), as in linear. Its values are not read: it says that d_bias exists.

        Returns:
          d_x, d_weight, d_bias: the shape and dtype of x, weight and bias, None where that was not given. The slope at
            an
          infinite pre is its limit, 1 or 0, but NaN for silu (inf 0).
        """
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array,
        d_y: Array,
        pre: Array | None = None,
        bias: Array | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias"]] | None,
    ) -> LinearVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        d_y: NDArray[Any],
        pre: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> LinearVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any],
        d_y: NDArray[Any],
        pre: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight", "d_bias"]] | None,
    ) -> LinearVjpOut[NDArray[Any] | None]: ...

class LogsumexpOp(Op):
    @overload
    def __call__(self, x: Array, *, axis: int = -1) -> Array:
        """y = m + log sum exp(x - m) along ``axis``, m = max x or 0 if that is infinite, in float32 (float64 for
        float64).

        Args:
          x: any shape with at least one axis.
          axis: the axis that is reduced; y does not have it.

        Returns:
          y: x's dtype. A row with NaN gives NaN, else one with +inf gives +inf; nothing but -inf, or nothing at all,
            -inf.
        """
    @overload
    def __call__(self, x: NDArray[Any], *, axis: int = -1) -> NDArray[Any]: ...

class LogsumexpVjpOut(NamedTuple, Generic[T]):
    d_x: T

class LogsumexpVjpOp(Op):
    @overload
    def __call__(self, x: Array, d_y: Array, *, axis: int = -1, wants: None = None) -> LogsumexpVjpOut[Array]:
        """d_x = d_y p, p = exp(x - m) / sum exp(x - m) along ``axis``, m = max x, in float32 (float64 for float64).

        The weights p are made from x again: exp(x - y) would carry the rounding of y, which in 16 bits is a part in a
        hundred of p and more.

        Args:
          x: what logsumexp was given; d_y: the cotangent of what it returned, without the axis.
          axis: the axis that logsumexp reduced.

        Returns:
          d_x: the shape and dtype of x. A row that holds NaN or +inf, or nothing but -inf, is all NaN.
        """
    @overload
    def __call__(
        self,
        x: Array,
        d_y: Array,
        *,
        axis: int = -1,
        wants: Iterable[Literal["d_x"]] | None,
    ) -> LogsumexpVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        d_y: NDArray[Any],
        *,
        axis: int = -1,
        wants: None = None,
    ) -> LogsumexpVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        d_y: NDArray[Any],
        *,
        axis: int = -1,
        wants: Iterable[Literal["d_x"]] | None,
    ) -> LogsumexpVjpOut[NDArray[Any] | None]: ...

class MatmulOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        out_dtype: Any | None = None,
    ) -> Array:
        """c = a @ b, accumulated in float32 (float64 for float64) and rounded once.

        Args:
          a: (*batch, m, k); b: (*batch, k, n). The leading axes broadcast as NumPy's do.
          precision: for float32 operands: "ieee" keeps every product exact to float32, "tf32" lets the matrix unit keep
            10
            bits of each operand, of which the largest, from 2^128 - 2^116 on, then may be infinite: what they are
            multiplied with is not promised.
          out_dtype: dtype of c; None: that of a and b.

        Returns:
          c: (*batch, m, n). k = 0 gives zeros.
        """
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        out_dtype: Any | None = None,
    ) -> NDArray[Any]: ...

class MatmulVjpOut(NamedTuple, Generic[T]):
    d_a: T
    d_b: T

class MatmulVjpOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        d_c: Array,
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> MatmulVjpOut[Array]:
        """d_a = d_c b^T and d_b = a^T d_c, accumulated in float32 and rounded once.

        Each is summed over the batch axes along which its operand was broadcast. A batch axis that is summed is one
        more
        factor of the contraction: with it folded in beside n (d_a) or m (d_b), each gradient is one matrix product.

        Args:
          a: (*batch, m, k); b: (*batch, k, n), as in matmul.
          d_c: (*batch, m, n), the cotangent of c, of any float dtype. A product of two dtypes is taken in float32, or
            in
            float64 where one of them is.
          precision: for float32 products, as in matmul.

        Returns:
          d_a, d_b: the shape and dtype of a and of b.
        """
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        d_c: Array,
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_a", "d_b"]] | None,
    ) -> MatmulVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        d_c: NDArray[Any],
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> MatmulVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        d_c: NDArray[Any],
        *,
        precision: Literal["ieee", "tf32"] = "ieee",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_a", "d_b"]] | None,
    ) -> MatmulVjpOut[NDArray[Any] | None]: ...

class MergeStatesOut(NamedTuple, Generic[T]):
    o: T
    lse: T

class MergeStatesOp(Op):
    @overload
    def __call__(self, o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> MergeStatesOut[Array]:
        """o = w_a o_a + w_b o_b and lse = log(exp(lse_a) + exp(lse_b)), with w_a = 1 / (1 + exp(lse_b - lse_a)).

        Logarithms are natural, as those of ``attention`` are: multiply a lse of base 2, such as FlashInfer's, by log(2)
        before. Parts are the attentions of the same queries over disjoint sets of keys: a shared prefix and a suffix,
        chunks of a long context, or what each device of a ring holds. The merge of all parts, in any order, is the
        attention over all keys, but for rounding. In float32 (float64 for float64).

        The source is Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding"; the weights are those of cascade inference
        (Ye et al. 2024).

        Args:
          o_a, o_b: (*batch, tokens, heads, d), the outputs over either set of keys. lse_a, lse_b: (*batch, heads,
            tokens),
            float32 (float64 beside float64), their log-sum-exp. These are the layouts of the results of ``attention``
              with
            ``return_lse``.

        Returns:
          o: the shape and dtype of o_a; lse: the shape of lse_a. Where parts a and b are exchanged the bits are the
            same.

          A part whose lse is -inf saw no key: its o is not read, so that NaN in it reaches nothing, and the result is
            the
          other part, to the bit. Where both are -inf, o is 0 and lse -inf. Otherwise by the formula: NaN in o reaches
            its
          own element, and NaN in lse its row of o and its lse. A lse of +inf outweighs any other (0 times an infinite o
            is
          NaN); two of them have no weights: o is NaN and lse +inf.
        """
    @overload
    def __call__(
        self,
        o_a: NDArray[Any],
        lse_a: NDArray[Any],
        o_b: NDArray[Any],
        lse_b: NDArray[Any],
    ) -> MergeStatesOut[NDArray[Any]]: ...

class MergeStatesVjpOut(NamedTuple, Generic[T]):
    d_o_a: T
    d_lse_a: T
    d_o_b: T
    d_lse_b: T

class MergeStatesVjpOp(Op):
    @overload
    def __call__(
        self,
        o_a: Array,
        lse_a: Array,
        o_b: Array,
        lse_b: Array,
        d_o: Array,
        d_lse: Array | None = None,
        *,
        wants: None = None,
    ) -> MergeStatesVjpOut[Array]:
        """d_o_a = w_a d_o and d_lse_a = w_a d_lse + w_a w_b S, S = sum d_o (o_a - o_b) over d; b likewise, exchanged.

        w_a = 1 / (1 + exp(lse_b - lse_a)), w_b = 1 - w_a, made again from both lse. In float32 (float64 for float64).

        Args:
          o_a, lse_a, o_b, lse_b: what merge_states was given.
          d_o, d_lse: cotangents of o (its dtype) and lse (float32; float64 beside float64); d_lse None is 0.

        Returns:
          d_o_a, d_lse_a, d_o_b, d_lse_b: the shapes and dtypes of what they are the gradients of. A part whose lse is
            -inf
          has gradients of 0, whatever the cotangents hold, and its o is not read: the other part's are then d_o and
            d_lse,
          to the bit. NaN and infinities otherwise reach what the formula says: one in d_o or o its row's d_lse.
        """
    @overload
    def __call__(
        self,
        o_a: Array,
        lse_a: Array,
        o_b: Array,
        lse_b: Array,
        d_o: Array,
        d_lse: Array | None = None,
        *,
        wants: Iterable[Literal["d_o_a", "d_lse_a", "d_o_b", "d_lse_b"]] | None,
    ) -> MergeStatesVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        o_a: NDArray[Any],
        lse_a: NDArray[Any],
        o_b: NDArray[Any],
        lse_b: NDArray[Any],
        d_o: NDArray[Any],
        d_lse: NDArray[Any] | None = None,
        *,
        wants: None = None,
    ) -> MergeStatesVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        o_a: NDArray[Any],
        lse_a: NDArray[Any],
        o_b: NDArray[Any],
        lse_b: NDArray[Any],
        d_o: NDArray[Any],
        d_lse: NDArray[Any] | None = None,
        *,
        wants: Iterable[Literal["d_o_a", "d_lse_a", "d_o_b", "d_lse_b"]] | None,
    ) -> MergeStatesVjpOut[NDArray[Any] | None]: ...

class PagedAttentionOut(NamedTuple, Generic[T]):
    o: T
    lse: T

class PagedAttentionOp(Op):
    @overload
    def __call__(
        self,
        q: Array,
        k_pages: Array,
        v_pages: Array,
        page_table: Array,
        kv_lens: Array,
        q_starts: Array,
        sinks: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[False] = False,
    ) -> Array:
        """o = attention of each sequence's queries over its keys, which lie in pages that a table names.

        Key j of sequence s is k_pages[page_table[s, j // page_size], j % page_size], for j < kv_lens[s]; its queries
        are q
        from q_starts[s] to q_starts[s + 1]. One call may hold sequences that decode (one query) and chunks of prompts
        (some
        queries), in any order. Pages of no sequence, slots behind a sequence's last key, and what the table says behind
        its
        last page reach nothing, whatever they hold. Sequences may share pages.

        Args:
          q: (tokens, kv_heads*group, d), the queries of one sequence after the other. Query head h reads key head h //
            group.
          k_pages: (pages, page_size, kv_heads, d); v_pages: (pages, page_size, kv_heads, dv), of any strides. Each has
            q's
            dtype, or float8_e4m3fn or float8_e5m2, whose numbers are taken as they are.
          page_table: (sequences, pages_each), the pages of each sequence in the order of its keys.
          kv_lens: (sequences), how many keys each has, those of its own queries among them; at most pages_each *
            page_size.
          q_starts: (sequences + 1), where the queries of each begin, from 0 on, and where the last one's end; to decode
            one
            token of each: arange(sequences + 1).
          sinks: (kv_heads*group,): a logit of each query head in its softmax's denominator, as in attention; q's dtype
            or
            float32. -inf is none, to the bit.
          k_scale, v_scale: (kv_heads,), float32, finite: what the keys, or the values, of a head are multiplied by.
            None is
            1, to the bit. Keys and values are the exact products: kernels scale scores and sums.
          alibi_slopes: (kv_heads*group,), float32: of each query head, what a score falls by for each key between its
            key
            and the query's place, as in attention; query i of the n of a sequence stands at key i + kv_len - n.
          is_causal: query i of the n of a sequence sees keys up to i + kv_len - n: the last query stands at the last
            key.
          window: (left, right): query i sees keys from i + kv_len - n - left to i + kv_len - n + right; None on a side
            is
            unbounded.
          scale: None is 1/sqrt(d).
          softcap: c: scores become c tanh(s/c).
          precision: for float32 operands, as in attention.
          return_lse: also return the log-sum-exp.

        Returns:
          o: (tokens, kv_heads*group, dv), q's dtype; with return_lse also lse: (kv_heads*group, tokens), float32,
            natural
          log. A query that sees no key, as the first ones of a sequence of more queries than keys under a causal mask,
            is
          zeros, its lse the sink, or -inf without one. A token behind the last sequence is zeros too, and has no sink:
            its
          lse is -inf. A NaN of a key or value reaches the queries that see it. No bit of a query depends on other
          sequences, on the pages that hold its keys, on the table's width, or on how many queries are in its chunk.
        """
    @overload
    def __call__(
        self,
        q: Array,
        k_pages: Array,
        v_pages: Array,
        page_table: Array,
        kv_lens: Array,
        q_starts: Array,
        sinks: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[True],
    ) -> PagedAttentionOut[Array]: ...
    @overload
    def __call__(
        self,
        q: Array,
        k_pages: Array,
        v_pages: Array,
        page_table: Array,
        kv_lens: Array,
        q_starts: Array,
        sinks: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: bool = False,
    ) -> Array | PagedAttentionOut[Array]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k_pages: NDArray[Any],
        v_pages: NDArray[Any],
        page_table: NDArray[Any],
        kv_lens: NDArray[Any],
        q_starts: NDArray[Any],
        sinks: NDArray[Any] | None = None,
        k_scale: NDArray[Any] | None = None,
        v_scale: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[False] = False,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k_pages: NDArray[Any],
        v_pages: NDArray[Any],
        page_table: NDArray[Any],
        kv_lens: NDArray[Any],
        q_starts: NDArray[Any],
        sinks: NDArray[Any] | None = None,
        k_scale: NDArray[Any] | None = None,
        v_scale: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[True],
    ) -> PagedAttentionOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k_pages: NDArray[Any],
        v_pages: NDArray[Any],
        page_table: NDArray[Any],
        kv_lens: NDArray[Any],
        q_starts: NDArray[Any],
        sinks: NDArray[Any] | None = None,
        k_scale: NDArray[Any] | None = None,
        v_scale: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: bool = False,
    ) -> NDArray[Any] | PagedAttentionOut[NDArray[Any]]: ...

class PermuteOut(NamedTuple, Generic[T]):
    y: T
    positions: T
    group_ends: T

class PermuteOp(Op):
    @overload
    def __call__(self, x: Array, indices: Array, *, experts: int = 1) -> PermuteOut[Array]:
        """The row of each token once for each of its experts, those of an expert beside each other.

        Rows of an expert stand in the order of their tokens, and two of one token in that of indices. So one result is
        right: the sort is stable.

        Args:
          x: (tokens, d), of any strides.
          indices: (tokens, k), int32 or int64, the experts of each token, as ``top_k`` of a router's logits gives them.
            A
            number that is no expert, such as -1 or one of an expert on another device, sends the token nowhere.
          experts: how many experts there are, from 0 to experts - 1.

        Returns:
          y: (tokens * k, d), with the bits of the rows of x. Behind the last expert's rows, as many as were sent
            nowhere,
          are zeros.
          positions: (tokens, k), int32: y[positions[t, j]] is x[t] for the expert indices[t, j]; -1 for one that is
            none.
          ``unpermute`` reads it.
          group_ends: (experts,), int32, before which row of y each expert's end: what ``grouped_matmul`` takes.
        """
    @overload
    def __call__(self, x: NDArray[Any], indices: NDArray[Any], *, experts: int = 1) -> PermuteOut[NDArray[Any]]: ...

class PermuteVjpOut(NamedTuple, Generic[T]):
    d_x: T

class PermuteVjpOp(Op):
    @overload
    def __call__(
        self,
        d_y: Array,
        positions: Array,
        group_ends: Array,
        *,
        experts: int = 1,
        wants: None = None,
    ) -> PermuteVjpOut[Array]:
        """d_x[t] = sum of d_y[positions[t, j]] over j, in float32 (float64 for float64), rounded once.

        Args:
          d_y: (tokens * k, d), the cotangent of y, of any strides.
          positions: (tokens, k), int32, what permute gave; group_ends: (experts,), for its extent alone.
          experts: how many experts permute was given.

        Returns:
          d_x: (tokens, d), the shape and dtype of permute's x. A token's terms are added in the order of j, whatever
            other
          tokens have. A position that is no row, a negative one too, adds nothing; a token without a row is zeros.
        """
    @overload
    def __call__(
        self,
        d_y: Array,
        positions: Array,
        group_ends: Array,
        *,
        experts: int = 1,
        wants: Iterable[Literal["d_x"]] | None,
    ) -> PermuteVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        d_y: NDArray[Any],
        positions: NDArray[Any],
        group_ends: NDArray[Any],
        *,
        experts: int = 1,
        wants: None = None,
    ) -> PermuteVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        d_y: NDArray[Any],
        positions: NDArray[Any],
        group_ends: NDArray[Any],
        *,
        experts: int = 1,
        wants: Iterable[Literal["d_x"]] | None,
    ) -> PermuteVjpOut[NDArray[Any] | None]: ...

class QuantizeOut(NamedTuple, Generic[T]):
    q: T
    scale: T

class QuantizeOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        static_scale: Array | None = None,
        *,
        height: int = 1,
        width: int = 128,
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
    ) -> QuantizeOut[Array]:
        """Codes of 8 bits and the scales of their blocks, for which x is about q scale.

        A block is (height, width). (1, n) is a scale for each row, as of a token; (1, 128) one for each group of 128
        numbers of a row; (m, n) one for the whole tensor; (128, 128) those of weights beside such groups. Of an array
        with
        more axes a caller passes the view of two.

        L is the largest number of ``to``: 448 of float8_e4m3fn, 57344 of float8_e5m2, 127 of int8, whose codes are -127
        to
        127. In float32 (float64 for float64):

            scale = max |x| / L of a block, 1 of a block of zeros
            q = x / scale, and L or -L where that is further from 0, rounded to nearest, ties to even

        Args:
          x: (m, n), any strides.
          static_scale: (m / height or 1, n / width or 1), scales that were measured before: nothing of x is looked at
            to
            find them. Between 2^-126 and 2^126.
          height, width: of a block; they divide m and n.
          to: the dtype of the codes.
          scales: "power_of_two" takes the least power of two that is no less than max |x| / L: what ue8m0 can hold.
            Nothing is rounded then but the codes.
          scale_ub: max |x| counts as no more than this, so that one outlier does not take the digits of all: it
            saturates.
            vLLM's option of this name.
          scale_floor: scales are no less, those of zeros neither; with "power_of_two" the least power of two that is no
            less. vLLM has 1 / (L 512).

        Returns:
          q: the shape of x and the dtype ``to``. scale: (m / height, n / width), float32; given ones as they are.
          No scale is below 2^-126. A NaN makes the scale and all codes of its block NaN, and beside given scales its
            own
          code; an infinity without scale_ub makes the scale inf, the finite codes of its block 0 and its own NaN, and
            with
          one or beside given scales L of its sign. int8 has no NaN: nothing is promised of a code that would be.
          Nothing is promised of a block whose max |x| is subnormal.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        static_scale: NDArray[Any] | None = None,
        *,
        height: int = 1,
        width: int = 128,
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
    ) -> QuantizeOut[NDArray[Any]]: ...

class RmsnormOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
    ) -> Array:
        """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 (float64 for float64).

        The source is Zhang and Sennrich 2019, equation 4.

        Args:
          x: (*batch, n).
          weight: (n,), x's dtype or float32; None is 1. A model that keeps weight - 1 passes the sum.
          eps: added to the mean of squares, >= 0; a number, where torch.nn.functional.rms_norm takes None for a dtype's
            own.
          rounding: "once" rounds the result to x's dtype and nothing before it, as torch.nn.functional.rms_norm and
            Gemma
            do; "before_weight" also rounds x / sqrt(...) to x's dtype before the product with weight, as Llama does.
              They
            differ where x has 16 bits and there is a weight.

        Returns:
          y: the shape and dtype of x. What arithmetic makes of infinities: a NaN makes its row NaN; an inf makes its
            own
          element NaN and the others of its row 0. Guaranteed while a row's sum of x^2 is under 2^127 (2^1023 in
            float64).
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any] | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
    ) -> NDArray[Any]: ...

class RmsnormQuantizeOut(NamedTuple, Generic[T]):
    q: T
    scale: T

class RmsnormQuantizeOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        weight: Array | None = None,
        *,
        width: int = 128,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
    ) -> RmsnormQuantizeOut[Array]:
        """Codes of 8 bits of y = rmsnorm(x, weight), and a scale for each ``width`` numbers of a row: y is about q
        scale.

        What is quantised is y in float32 (float64 for float64): it is never rounded to 16 bits. quantize of a y that
        rmsnorm rounded to x's dtype has other codes where that rounding crosses a tie.

        Args:
          x, weight, eps, rounding: as in rmsnorm.
          width: how many numbers of a row share a scale, the last of a row as many as are left: 128 for groups, n (or
            more)
            for one scale a token. scaled_matmul takes both as ``scale_a``, with ``k_width=width``.
          to, scales, scale_ub, scale_floor: as in quantize.

        Returns:
          q: the shape of x and the dtype ``to``; scale: (*batch, n / width rounded up), float32. The scale of a group
            is 1
          where y is all zeros, and q saturates at L under scale_ub, as in quantize. What rmsnorm makes of NaN and
          infinities is quantised: a NaN in x makes all codes and scales of its row NaN; an infinity those of its own
            group,
          and the others of its row codes of zeros. No code of int8 that would be NaN is promised, and nothing of a
            group
          whose max |y| may be subnormal.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        weight: NDArray[Any] | None = None,
        *,
        width: int = 128,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
    ) -> RmsnormQuantizeOut[NDArray[Any]]: ...

class RmsnormVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weight: T | None

class RmsnormVjpOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        d_y: Array,
        weight: Array | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> RmsnormVjpOut[Array]:
        """With r = (mean(x^2) + eps)^-1/2, xh = x r and h = d_y weight, in float32 (float64 for float64):

        d_x = r (h - xh mean(h xh)) and d_weight = sum of d_y xh over all rows.

        Args:
          x: (*batch, n), as in rmsnorm; d_y: (*batch, n), the cotangent of its y.
          weight: (n,), x's dtype or float32, as in rmsnorm.
          eps: as in rmsnorm.
          rounding: as in rmsnorm. "before_weight" takes the rounding for the identity, as autograd does: d_weight is
            the
            sum of d_y times xh as it was rounded to x's dtype, and h, the cotangent of that, is rounded to x's dtype.

        Returns:
          d_x: the shape and dtype of x; d_weight: those of weight, None where that was not given.
          An inf or NaN in a row of x makes its row of d_x NaN; the inf its column of d_weight, the NaN all of it. A NaN
            in
          d_y its row of d_x and its column of d_weight. Guaranteed while a row's sums of x^2 and of |h x| are under
            2^127
          (2^1023 in float64).
        """
    @overload
    def __call__(
        self,
        x: Array,
        d_y: Array,
        weight: Array | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight"]] | None,
    ) -> RmsnormVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> RmsnormVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        d_y: NDArray[Any],
        weight: NDArray[Any] | None = None,
        *,
        eps: float = 1e-06,
        rounding: Literal["once", "before_weight"] = "once",
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weight"]] | None,
    ) -> RmsnormVjpOut[NDArray[Any] | None]: ...

class RopeOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        cos: Array,
        sin: Array,
        *,
        interleaved: bool = False,
        overwrite: Literal["x"] | Iterable[Literal["x"]] | None = None,
    ) -> Array:
        """y_a = x_a cos - x_b sin and y_b = x_b cos + x_a sin for each pair (a, b) of a head's numbers, in float32.

        With P pairs, the i-th is (i, P + i), the halves of Llama and GPT-NeoX, or with interleaved (2 i, 2 i + 1), the
        neighbours of GPT-J. What lies beyond the 2 P first numbers of a head passes through. In float64 for float64.
        The
        source is Su et al. 2021, "RoFormer", equation 34.

        The tables say everything of positions: no angle is formed here, so that no bit of one is lost here either, at
        position 131072 as at 0. Frequencies of any scaling, and an attention factor, are in the tables
        (``portakern.torch.rotary_tables``, ``portakern.jax.rotary_tables``), which all layers of a model, q and k,
        share.

        Args:
          x: (batch, seq, heads, d), any strides: the view q.transpose(1, 2) of a model that keeps heads first costs
            nothing; cos, sin: (batch or 1, seq, P), one column a pair, of x's dtype or float32. Two equal halves, as
            transformers has them, are one too many: cos[..., :P].
          interleaved: which numbers of a head are a pair.

        Returns:
          y: the shape and dtype of x. Infinities and NaN of a number, or of a table, reach their pair by plain
            arithmetic
          (inf 0 is NaN), and no other. cos and sin have no gradient.
        """
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        cos: NDArray[Any],
        sin: NDArray[Any],
        *,
        interleaved: bool = False,
        overwrite: Literal["x"] | Iterable[Literal["x"]] | None = None,
    ) -> NDArray[Any]: ...

class RopeVjpOut(NamedTuple, Generic[T]):
    d_x: T

class RopeVjpOp(Op):
    @overload
    def __call__(
        self,
        d_y: Array,
        cos: Array,
        sin: Array,
        *,
        interleaved: bool = False,
        wants: None = None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> RopeVjpOut[Array]:
        """d_x_a = d_y_a cos + d_y_b sin and d_x_b = d_y_b cos - d_y_a sin for each pair (a, b): rope by cos and -sin.

        For tables of one angle that is the turn back; for any others, such as those with an attention factor, it is the
        gradient just the same. Nothing of x is needed.

        Args:
          d_y: (batch, seq, heads, d), the cotangent of what rope returned; cos, sin, interleaved: what rope was given.

        Returns:
          d_x: the shape and dtype of d_y. NaN and infinities reach what they reach in rope.
        """
    @overload
    def __call__(
        self,
        d_y: Array,
        cos: Array,
        sin: Array,
        *,
        interleaved: bool = False,
        wants: Iterable[Literal["d_x"]] | None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> RopeVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        d_y: NDArray[Any],
        cos: NDArray[Any],
        sin: NDArray[Any],
        *,
        interleaved: bool = False,
        wants: None = None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> RopeVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        d_y: NDArray[Any],
        cos: NDArray[Any],
        sin: NDArray[Any],
        *,
        interleaved: bool = False,
        wants: Iterable[Literal["d_x"]] | None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> RopeVjpOut[NDArray[Any] | None]: ...

class RouterOut(NamedTuple, Generic[T]):
    weights: T
    indices: T

class RouterOp(Op):
    @overload
    def __call__(
        self,
        logits: Array,
        bias: Array | None = None,
        *,
        k: int = 1,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        groups_kept: int | None = None,
        normalize: bool = False,
        scale: float = 1.0,
    ) -> RouterOut[Array]:
        """The k experts of each token, the best first, and their weights, in float32 (float64 for float64).

        ``normalize=True`` divides the weights by their sum: Mixtral's router, and Qwen3-MoE's with norm_topk_prob. Of
        softmax that is the softmax of the k greatest logits, as gpt-oss writes it, and is computed so. DeepSeek-V3 has
        ``scoring="sigmoid"``, a bias, groups and a scale beside.

        The experts are chosen by s + bias, and without a bias by the logits themselves, exactly, as both scores rise
        with
        them. Of equal ones the expert with the lower index comes first, of equal groups the lower one; 0 and -0 are
        equal,
        and a NaN is greater than any other number and equal to every NaN, as in ``top_k``. Sums s + bias, and those of
        groups, are rounded: of two that are closer than that either is right, unless logits and biases are the same.

        Args:
          logits: (*batch, experts), any strides.
          bias: (experts), float32, added to scores for the choice alone: DeepSeek-V3's e_score_correction_bias. No
            weight
            depends on it, and it has no gradient.
          k: experts of a token.
          scoring: "softmax" of all experts, or "sigmoid" of each.
          groups: of experts that stand beside each other, all of one size.
          groups_kept: as many groups, those whose two best experts have the greatest sum of s + bias, may have experts
            chosen; None: all.
          normalize: weights are divided by their sum (of sigmoids, by 1e-20 more).
          scale: what weights are multiplied with in the end: routed_scaling_factor.

        Returns:
          weights: (*batch, k), float32. indices: (*batch, k), int32, no two of a row the same.
          Arithmetic says where NaN are: softmax makes a row of weights NaN where any logit is NaN or inf, or all are
            -inf;
          with ``normalize`` only chosen logits count, as they do for sigmoid.
        """
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        bias: NDArray[Any] | None = None,
        *,
        k: int = 1,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        groups_kept: int | None = None,
        normalize: bool = False,
        scale: float = 1.0,
    ) -> RouterOut[NDArray[Any]]: ...

class RouterVjpOut(NamedTuple, Generic[T]):
    d_logits: T

class RouterVjpOp(Op):
    @overload
    def __call__(
        self,
        logits: Array,
        indices: Array,
        d_weights: Array,
        *,
        k: int = 1,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        normalize: bool = False,
        scale: float = 1.0,
        wants: None = None,
    ) -> RouterVjpOut[Array]:
        """The gradient of the weights, the choice as it was: in float32 (float64 for float64).

        With g = d_weights at the experts of ``indices`` and 0 elsewhere, s the scores, and h = s / sum of the chosen
        ones:

            sigmoid:                scale s (1 - s) g
            sigmoid, normalize:     scale h (1 - s) (g - sum g h)
            softmax, normalize:     scale h (g - sum g h)
            softmax:                scale s (g - sum g s), for experts that were not chosen too

        Elsewhere it is 0: an expert that was not chosen counts in softmax's sum alone, and no bias or group counts.

        Args:
          logits: (*batch, experts), what router was given.
          indices: (*batch, k), int32, what router gave: from 0 to experts - 1, no two of a row the same.
          d_weights: (*batch, k), float32, the cotangent of the weights.
          k, scoring, groups, normalize, scale: router's; how many groups there are changes nothing.

        Returns:
          d_logits: the shape and dtype of logits. A NaN in d_weights reaches its own expert, where weights are divided
            by a
          sum the chosen ones of its row, and of softmax without ``normalize`` the whole row.
        """
    @overload
    def __call__(
        self,
        logits: Array,
        indices: Array,
        d_weights: Array,
        *,
        k: int = 1,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        normalize: bool = False,
        scale: float = 1.0,
        wants: Iterable[Literal["d_logits"]] | None,
    ) -> RouterVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        indices: NDArray[Any],
        d_weights: NDArray[Any],
        *,
        k: int = 1,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        normalize: bool = False,
        scale: float = 1.0,
        wants: None = None,
    ) -> RouterVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        logits: NDArray[Any],
        indices: NDArray[Any],
        d_weights: NDArray[Any],
        *,
        k: int = 1,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        normalize: bool = False,
        scale: float = 1.0,
        wants: Iterable[Literal["d_logits"]] | None,
    ) -> RouterVjpOut[NDArray[Any] | None]: ...

class ScaledGroupedMatmulOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        group_ends: Array,
        scale_a: Array,
        scale_b: Array,
        bias: Array | None = None,
        *,
        n_width: int = 1,
        k_width: int = 128,
        precision: Literal["promoted", "ieee", "fast"] = "promoted",
        out_dtype: Any = "bfloat16",
    ) -> Array:
        """c = the sum over blocks of k of (scale_a a) (scale_b b_g), + bias_g, for the rows of each group g, rounded
        once.

        Group g has the rows from group_ends[g - 1], of the first group from 0, up to group_ends[g]. A row's result is
        that
        of ``scaled_matmul`` on it, its scales, and its group's matrix, scales and bias, and its bits depend on nothing
        else.

        Along each axis a scale array has the extent 1, one scale for all, or one for each row, group or block:

        ============================================== ============================ ===============================
        ======
        torch.nn.functional.scaled_grouped_mm          scale_a                      scale_b
        widths
        ============================================== ============================ ===============================
        ======
        TensorWise, of all rows and of each group      (1, 1)                       (groups, 1, 1)                  any
        RowWise                                        (rows, 1)                    (groups, 1, n)                  1,
        any
        BlockWise1x128 with BlockWise128x128           (rows, k / 128)              (groups, k / 128, n / 128)      128,
        128
        BlockWise1x32                                  (rows, k / 32)               (groups, k / 32, n)             1,
        32
        rows beside blocks                             (rows, 1)                    (groups, k / 128, n / 128)      128,
        128
        ============================================== ============================ ===============================
        ======

        The widths are those (n, k) of ``scaled_matmul``; a row of a is a token, and shares no scale unless all do.

        Args:
          a: (rows, k), the rows of a group beside each other, group after group; b: (groups, k, n), a matrix for each
            group; each float8_e4m3fn or float8_e5m2, or both int8. Weights (groups, n, k) come as b.mT; Hopper's and
            CDNA's matrix units want them so.
          group_ends: (groups,), the row before which each group ends, as in grouped_matmul: they rise, may repeat, and
            may
            leave rows.
          scale_a: (1 or rows, 1 or k / k_width); scale_b: (1 or groups, 1 or k / k_width, 1 or n / n_width), float32,
            rounded up. float8_e8m0fnu is converted to float32, which holds it.
          bias: (groups, n), float32, which holds 16-bit ones.
          n_width, k_width: columns and elements along k that share a scale.
          precision: of the sums of products of 8-bit floats, as in scaled_matmul.
          out_dtype: dtype of c.

        Returns:
          c: (rows, n). Rows from the last end on belong to no group: zeros, whatever a and scale_a hold there. k = 0 is
          refused.
        """
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        group_ends: NDArray[Any],
        scale_a: NDArray[Any],
        scale_b: NDArray[Any],
        bias: NDArray[Any] | None = None,
        *,
        n_width: int = 1,
        k_width: int = 128,
        precision: Literal["promoted", "ieee", "fast"] = "promoted",
        out_dtype: Any = "bfloat16",
    ) -> NDArray[Any]: ...

class ScaledMatmulOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        scale_a: Array,
        scale_b: Array,
        bias: Array | None = None,
        *,
        m_width: int = 1,
        n_width: int = 1,
        k_width: int = 128,
        precision: Literal["promoted", "ieee", "fast"] = "promoted",
        out_dtype: Any = "bfloat16",
    ) -> Array:
        """c = the sum over blocks of k of (scale_a a) (scale_b b), + bias, rounded once.

        Products are exact in float32, and those of int8 are summed in int32 without an error. Scales are applied to the
        sum of a block, in float32, or, where neither operand has more than one along k, to the whole sum.

        Along each axis a scale array has the extent 1, one scale for all, or one for each block: ceil(extent / width),
        the
        last of which may be short. The recipes, with the widths (m, n, k) in the order of DeepGEMM's ``recipe``:

        ============================================== ================================== ===================
        torch.nn.functional.scaled_mm                  scale_a, scale_b                   widths
        ============================================== ================================== ===================
        TensorWise                                     (1, 1), (1, 1)                     any
        RowWise                                        (m, 1), (1, n)                     1, 1, any
        BlockWise1x128 with BlockWise128x128           (m, k / 128), (k / 128, n / 128)   1, 128, 128
        BlockWise1x128 with BlockWise1x128             (m, k / 128), (k / 128, n)         1, 1, 128
        BlockWise128x128 with BlockWise1x128           (m / 128, k / 128), (k / 128, n)   128, 1, 128
        BlockWise1x32                                  (m, k / 32), (k / 32, n)           1, 1, 32
        rows beside blocks                             (m, 1), (k / 128, n / 128)         1, 128, 128
        ============================================== ================================== ===================

        The widths are said, as by the names of torch's recipes and by DeepGEMM's ``recipe``, and not read off the
        shapes:
        3 scales for 300 elements may be of 100 each or of 128, and a wrong guess would be a wrong result. A shape that
        no
        width explains is refused.

        A NaN or an infinity in a reaches its row of c, one in b its column, one in a scale its block; 0 times an
        infinite
        scale is NaN. float8_e4m3fn has NaN and no infinity.

        Args:
          a: (m, k); b: (k, n), each float8_e4m3fn or float8_e5m2, or both int8. Weights (n, k) come as b.T; Hopper's
            and
            CDNA's matrix units want them so.
          scale_a: (1 or m / m_width, 1 or k / k_width); scale_b: (1 or k / k_width, 1 or n / n_width), float32, rounded
            up.
            Scales of float8_e8m0fnu are powers of two: convert them to float32, which holds each of them. No kernel
              reads
            swizzled or packed scales.
          bias: (n), float32, which holds 16-bit ones.
          m_width, n_width, k_width: rows, columns and elements along k that share a scale.
          precision: of the sums of products of 8-bit floats; those of int8 are exact. "promoted": of at most 128
            products
            to 13 bits behind the point, as Hopper's matrix unit has them, which are then added in float32; "ieee": all
              in
            float32, where the unit cannot by products of float16, at half the rate; "fast": of any number to 13 bits,
              as
            with torch's ``use_fast_accum``.
          out_dtype: dtype of c.

        Returns:
          c: (m, n). k = 0 is refused.
        """
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        scale_a: NDArray[Any],
        scale_b: NDArray[Any],
        bias: NDArray[Any] | None = None,
        *,
        m_width: int = 1,
        n_width: int = 1,
        k_width: int = 128,
        precision: Literal["promoted", "ieee", "fast"] = "promoted",
        out_dtype: Any = "bfloat16",
    ) -> NDArray[Any]: ...

class SoftmaxOp(Op):
    @overload
    def __call__(self, x: Array, *, axis: int = -1) -> Array:
        """y = exp(x - max x) / sum exp(x - max x) along ``axis``, in float32 (float64 for float64).

        Args:
          x: any shape with at least one axis.
          axis: the axis that sums to 1.

        Returns:
          y: the shape and dtype of x. A row that holds NaN or +inf, or nothing but -inf, is all NaN.
        """
    @overload
    def __call__(self, x: NDArray[Any], *, axis: int = -1) -> NDArray[Any]: ...

class SoftmaxVjpOut(NamedTuple, Generic[T]):
    d_x: T

class SoftmaxVjpOp(Op):
    @overload
    def __call__(
        self,
        y: Array,
        d_y: Array,
        *,
        axis: int = -1,
        wants: None = None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> SoftmaxVjpOut[Array]:
        """d_x = y (d_y - Delta), Delta = sum y d_y along ``axis``, in float32 (float64 for float64).

        Args:
          y: what softmax returned, as it was stored; d_y: its cotangent.
          axis: the axis along which y sums to 1.

        Returns:
          d_x: the shape and dtype of y. A row with a NaN in y or d_y is all NaN.
        """
    @overload
    def __call__(
        self,
        y: Array,
        d_y: Array,
        *,
        axis: int = -1,
        wants: Iterable[Literal["d_x"]] | None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> SoftmaxVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        y: NDArray[Any],
        d_y: NDArray[Any],
        *,
        axis: int = -1,
        wants: None = None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> SoftmaxVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        y: NDArray[Any],
        d_y: NDArray[Any],
        *,
        axis: int = -1,
        wants: Iterable[Literal["d_x"]] | None,
        overwrite: Literal["d_y"] | Iterable[Literal["d_y"]] | None = None,
    ) -> SoftmaxVjpOut[NDArray[Any] | None]: ...

class SwigluOp(Op):
    @overload
    def __call__(self, gate: Array, up: Array) -> Array:
        """y = silu(gate) up = gate / (1 + exp(-gate)) up, element by element, in float32 (float64 for float64).

        The source is Shazeer 2020, "GLU variants improve transformer", equation 5, with Swish_1 for silu.

        Args:
          gate: any shape, contiguous or not: such as one half of a projection; up: of that shape.

        Returns:
          y: the shape and dtype of gate. An infinity or NaN reaches its own element alone, by plain arithmetic:
            silu(inf)
          is inf, silu(-inf) is NaN, and an infinite up beside silu(0) gives NaN.
        """
    @overload
    def __call__(self, gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]: ...

class SwigluQuantizeOut(NamedTuple, Generic[T]):
    q: T
    scale: T

class SwigluQuantizeOp(Op):
    @overload
    def __call__(
        self,
        gate: Array,
        up: Array,
        *,
        width: int = 128,
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
    ) -> SwigluQuantizeOut[Array]:
        """Codes of 8 bits of y = silu(gate) up, and a scale for each ``width`` numbers of a row: y is about q scale.

        What is quantised is y in float32 (float64 for float64): it is never rounded to 16 bits.

        Args:
          gate: (*batch, n), any strides, such as one half of a projection; up: of that shape.
          width, to, scales, scale_ub, scale_floor: as in rmsnorm_quantize.

        Returns:
          q: the shape of gate and the dtype ``to``; scale: (*batch, n / width rounded up), float32. What swiglu makes
            of
          NaN and infinities is quantised, as quantize says: each reaches its own group alone. No code of int8 that
            would
          be NaN is promised, and nothing of a group whose max |y| may be subnormal or reaches 2^127 (2^1023 in
            float64).
        """
    @overload
    def __call__(
        self,
        gate: NDArray[Any],
        up: NDArray[Any],
        *,
        width: int = 128,
        to: Any = "float8_e4m3fn",
        scales: Literal["float32", "power_of_two"] = "float32",
        scale_ub: float | None = None,
        scale_floor: float = 0.0,
    ) -> SwigluQuantizeOut[NDArray[Any]]: ...

class SwigluVjpOut(NamedTuple, Generic[T]):
    d_gate: T
    d_up: T

class SwigluVjpOp(Op):
    @overload
    def __call__(
        self,
        gate: Array,
        up: Array,
        d_y: Array,
        *,
        wants: None = None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> SwigluVjpOut[Array]:
        """d_gate = d_y up s (1 + gate q) and d_up = d_y gate s, with s = 1 / (1 + exp(-gate)), q = 1 / (1 + exp(gate)).

        In float32 (float64 for float64), element by element.

        Args:
          gate, up: what swiglu was given; d_y: the cotangent of what it returned. All of one shape.

        Returns:
          d_gate, d_up: the shape and dtype of gate. An infinite gate gives NaN in d_gate (inf 0), and in d_up what
            swiglu
          gives with d_y for up.
        """
    @overload
    def __call__(
        self,
        gate: Array,
        up: Array,
        d_y: Array,
        *,
        wants: Iterable[Literal["d_gate", "d_up"]] | None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> SwigluVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        gate: NDArray[Any],
        up: NDArray[Any],
        d_y: NDArray[Any],
        *,
        wants: None = None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> SwigluVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        gate: NDArray[Any],
        up: NDArray[Any],
        d_y: NDArray[Any],
        *,
        wants: Iterable[Literal["d_gate", "d_up"]] | None,
        overwrite: Literal["gate", "up"] | Iterable[Literal["gate", "up"]] | None = None,
    ) -> SwigluVjpOut[NDArray[Any] | None]: ...

class TopKOut(NamedTuple, Generic[T]):
    values: T
    indices: T

class TopKOp(Op):
    @overload
    def __call__(self, x: Array, *, k: int = 1, largest: bool = True) -> TopKOut[Array]:
        """The k greatest numbers along the last axis, the greatest first, and their places.

        Of equal numbers the one with the lower index comes first; 0 and -0 are equal. A NaN is greater than any other
        number and equal to every NaN, as in NumPy's and PyTorch's sorts. So one result is right. JAX's top_k differs:
        -0 is
        less than 0 there, and a NaN with its sign set less than -inf.

        Args:
          x: (*batch, n), any strides.
          k: how many, from 1 to n.
          largest: False gives the k least numbers, the least first; NaN then comes last. Equal numbers stand by their
            index here too.

        Returns:
          values: (*batch, k), numbers of x, to the bit: a subnormal number stays one, and -0 stays -0.
          indices: (*batch, k), int32, where each stands along the last axis: no two of a row are the same.
        """
    @overload
    def __call__(self, x: NDArray[Any], *, k: int = 1, largest: bool = True) -> TopKOut[NDArray[Any]]: ...

class TopKVjpOut(NamedTuple, Generic[T]):
    d_x: T

class TopKVjpOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        indices: Array,
        d_values: Array,
        *,
        k: int = 1,
        wants: None = None,
    ) -> TopKVjpOut[Array]:
        """d_x[indices[t]] = d_values[t], and 0 elsewhere: numbers that were not chosen have no influence.

        Args:
          x: (*batch, n), what top_k was given, for its shape alone: no number of it is read.
          indices: (*batch, k), int32, what top_k gave: from 0 to n - 1, no two of a row the same.
          d_values: (*batch, k), the cotangent of the values.
          k: how many numbers top_k chose.

        Returns:
          d_x: the shape and dtype of x. Its numbers are those of d_values, to the bit, NaN and infinities too, or 0.
        """
    @overload
    def __call__(
        self,
        x: Array,
        indices: Array,
        d_values: Array,
        *,
        k: int = 1,
        wants: Iterable[Literal["d_x"]] | None,
    ) -> TopKVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        indices: NDArray[Any],
        d_values: NDArray[Any],
        *,
        k: int = 1,
        wants: None = None,
    ) -> TopKVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        indices: NDArray[Any],
        d_values: NDArray[Any],
        *,
        k: int = 1,
        wants: Iterable[Literal["d_x"]] | None,
    ) -> TopKVjpOut[NDArray[Any] | None]: ...

class UnpermuteOp(Op):
    @overload
    def __call__(self, x: Array, positions: Array, weights: Array) -> Array:
        """y[t] = sum of weights[t, j] x[positions[t, j]] over j, in float32 (float64 for float64), rounded once.

        Args:
          x: (rows, d), such as the results of experts in the order of ``permute``, of any strides.
          positions: (tokens, k), int32 or int64, where the rows of each token stand: what ``permute`` gave. A number
            that
            is no row, a negative one too, adds nothing, whatever its weight. No row may be named twice; kernels do not
              read
            positions to find out, and of a row that is named twice no gradient is promised.
          weights: (tokens, k), float32 (float64 beside float64), what a row counts, as a router's probabilities.

        Returns:
          y: (tokens, d), x's dtype. The terms of a token are added in the order of j, whatever other tokens name. A
            token
          without a row is zeros. NaN and infinities of a row, or of a weight, reach the token that names it: 0 times an
          infinity is NaN.
        """
    @overload
    def __call__(self, x: NDArray[Any], positions: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]: ...

class UnpermuteVjpOut(NamedTuple, Generic[T]):
    d_x: T
    d_weights: T

class UnpermuteVjpOp(Op):
    @overload
    def __call__(
        self,
        x: Array,
        positions: Array,
        weights: Array,
        d_y: Array,
        *,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> UnpermuteVjpOut[Array]:
        """d_x[positions[t, j]] = weights[t, j] d_y[t] and d_weights[t, j] = sum of d_y[t] x[positions[t, j]] over d, in
        float32 (float64 for float64), each rounded once.

        Args:
          x, positions, weights: as in unpermute.
          d_y: (tokens, d), the cotangent of y, of any strides.

        Returns:
          d_x: the shape and dtype of x. A row of no token is exact zeros.
          d_weights: the shape and dtype of weights. Exact zero where a position is no row.
        """
    @overload
    def __call__(
        self,
        x: Array,
        positions: Array,
        weights: Array,
        d_y: Array,
        *,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weights"]] | None,
    ) -> UnpermuteVjpOut[Array | None]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        positions: NDArray[Any],
        weights: NDArray[Any],
        d_y: NDArray[Any],
        *,
        gradient_dtype: Any | None = None,
        wants: None = None,
    ) -> UnpermuteVjpOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        x: NDArray[Any],
        positions: NDArray[Any],
        weights: NDArray[Any],
        d_y: NDArray[Any],
        *,
        gradient_dtype: Any | None = None,
        wants: Iterable[Literal["d_x", "d_weights"]] | None,
    ) -> UnpermuteVjpOut[NDArray[Any] | None]: ...

class VarlenAttentionOut(NamedTuple, Generic[T]):
    o: T
    lse: T

class VarlenAttentionOp(Op):
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        q_starts: Array,
        kv_starts: Array,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[False] = False,
    ) -> Array:
        """o = softmax(softcap(scale q k^T), masked) v for each sequence of a packed batch by itself.

        Sequence s has the queries from q_starts[s] up to q_starts[s + 1] and the keys from kv_starts[s] up to
        kv_starts[s + 1]. Its rows of the results are those of ``attention`` on these alone, to the bit, whatever lies
        beside them. The algorithm is FlashAttention-2's forward pass (Dao 2023, algorithm 1).

        Args:
          q: (tokens, kv_heads*group, d). Query head h reads key head h // group.
          k: (kv_tokens, kv_heads, d); v: (kv_tokens, kv_heads, dv).
          q_starts, kv_starts: (sequences + 1,): cumulative lengths, which rise and may repeat, within 0 and tokens, and
            0
            and kv_tokens.
          sinks: (kv_heads*group,): a logit of each query head in its softmax's denominator, as in attention; q's dtype
            or
            float32. -inf is none, to the bit.
          alibi_slopes: (kv_heads*group,), float32: of each query head, what a score falls by for each key between its
            key
            and the query's place, as in attention; query i of a sequence stands at key i + kv_len - q_len of its own.
          is_causal: query i of a sequence sees its keys up to i + kv_len - q_len, of that sequence's lengths (aligned
            at
            the bottom right: its last query sees all its keys).
          window: (left, right): query i sees keys from i + kv_len - q_len - left to i + kv_len - q_len + right; None on
            a
            side is unbounded.
          scale, softcap, precision, return_lse: as in attention.

        Returns:
          o: (tokens, kv_heads*group, dv), q's dtype; with return_lse also lse: (kv_heads*group, tokens), float32,
            natural
          log. A row that may see no key is zeros, its lse the sink, or -inf without one: a query of a sequence without
          keys, and a query that the masks hide every key from (with more queries than keys the first ones). A token of
            no
          sequence, which lies before the first start or from the last one on, is zeros too, and has no sink: its lse is
          -inf. What tokens of no sequence hold reaches nothing, and NaN and infinities stay in their sequence.
        """
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        q_starts: Array,
        kv_starts: Array,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[True],
    ) -> VarlenAttentionOut[Array]: ...
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        q_starts: Array,
        kv_starts: Array,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: bool = False,
    ) -> Array | VarlenAttentionOut[Array]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        q_starts: NDArray[Any],
        kv_starts: NDArray[Any],
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[False] = False,
    ) -> NDArray[Any]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        q_starts: NDArray[Any],
        kv_starts: NDArray[Any],
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: Literal[True],
    ) -> VarlenAttentionOut[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        q_starts: NDArray[Any],
        kv_starts: NDArray[Any],
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        return_lse: bool = False,
    ) -> NDArray[Any] | VarlenAttentionOut[NDArray[Any]]: ...

class VarlenAttentionGradients(NamedTuple, Generic[T]):
    d_q: T
    d_k: T
    d_v: T
    d_sinks: T | None

class VarlenAttentionVjpOp(Op):
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        q_starts: Array,
        kv_starts: Array,
        d_o: Array,
        d_lse: Array | None = None,
        lse_low: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        wants: None = None,
    ) -> VarlenAttentionGradients[Array]:
        """Gradients of varlen_attention from its own results: for each sequence those of ``attention_vjp`` on it alone,
        to
        the bit; those of sinks are summed over all sequences.

        The algorithm is FlashAttention-2's backward pass (Dao 2023, algorithm 2).

        Args:
          q, k, v, q_starts, kv_starts, sinks, alibi_slopes, is_causal, window, scale, softcap, precision: as in
            varlen_attention. Slopes have no gradient.
          o, lse, lse_low: what varlen_attention returned; lse_low None is 0.
          d_o, d_lse: cotangents of o (its dtype) and lse (float32); d_lse None is 0.

        Returns:
          d_q, d_k, d_v, d_sinks: the shapes and dtypes of q, k, v and sinks. Zeros for queries that saw no key, for
            keys
          that no query saw, and for tokens of no sequence, whatever q, k, v, o, lse and the cotangents hold there:
            nothing
          of it reaches d_sinks either.
        """
    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        q_starts: Array,
        kv_starts: Array,
        d_o: Array,
        d_lse: Array | None = None,
        lse_low: Array | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        wants: Iterable[Literal["d_q", "d_k", "d_v", "d_sinks"]] | None,
    ) -> VarlenAttentionGradients[Array | None]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        o: NDArray[Any],
        lse: NDArray[Any],
        q_starts: NDArray[Any],
        kv_starts: NDArray[Any],
        d_o: NDArray[Any],
        d_lse: NDArray[Any] | None = None,
        lse_low: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        wants: None = None,
    ) -> VarlenAttentionGradients[NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        o: NDArray[Any],
        lse: NDArray[Any],
        q_starts: NDArray[Any],
        kv_starts: NDArray[Any],
        d_o: NDArray[Any],
        d_lse: NDArray[Any] | None = None,
        lse_low: NDArray[Any] | None = None,
        sinks: NDArray[Any] | None = None,
        alibi_slopes: NDArray[Any] | None = None,
        *,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        precision: Literal["ieee", "tf32"] = "ieee",
        wants: Iterable[Literal["d_q", "d_k", "d_v", "d_sinks"]] | None,
    ) -> VarlenAttentionGradients[NDArray[Any] | None]: ...

class WeightOnlyMatmulOp(Op):
    @overload
    def __call__(
        self,
        a: Array,
        b: Array,
        scale_b: Array,
        zeros: Array | None = None,
        bias: Array | None = None,
        *,
        k_width: int = 128,
        codes_per_byte: int = 1,
        out_dtype: Any | None = None,
    ) -> Array:
        """c = a times the weights scale_b (q - zeros), + bias, summed in float32 (float64 for float64) and rounded
        once.

        No weight is rounded: codes are exact in each dtype of a, their products with a and the sums of a group are
        taken
        in float32, and the scale meets the sum of a group, or of a part of one. What the widely used kernels do, a
        weight
        scaled and rounded to 16 bits before it is multiplied, errs by 2^-9 or 2^-12 of each product, and is not
        offered.

        Codes of 8 bits are int8. Of 4 bits, byte t of a column has q[2 t] in its low half and q[2 t + 1] in its high
        one;
        without zeros they are two's complement, -8 to 7, with zeros unsigned, 0 to 15. Of an odd k the last high half
        counts nowhere. How the layouts of GPTQ, AWQ, ONNX and PyTorch map onto this one:
        docs/porting/weight_only_matmul.md.

        NaN and infinities in a reach their row of c, in scale_b, zeros and bias their column. What an infinity in
        scale_b
        or zeros, or in a beside zeros, gives there is not promised: NaN or an infinity.

        Args:
          a: (m, k).
          b: (k, n) int8, or (k / 2, n), rounded up, with codes_per_byte=2; an array of uint8 is given as a view of
            int8.
            Weights (n, k) come as b.T, and are read faster so by most GPUs.
          scale_b: (k / k_width, n), rounded up, or (1, n) for all of k; zeros: the same, in units of codes. Either may
            have
            one row beside groups of the other.
          bias: (n).
          scale_b, zeros and bias have the dtype of a, or are float32.
          k_width: elements along k that share a scale; even with codes_per_byte=2.
          codes_per_byte: 1, of 8 bits, or 2, of 4 bits.
          out_dtype: dtype of c; None: that of a.

        Returns:
          c: (m, n). k = 0 is refused.
        """
    @overload
    def __call__(
        self,
        a: NDArray[Any],
        b: NDArray[Any],
        scale_b: NDArray[Any],
        zeros: NDArray[Any] | None = None,
        bias: NDArray[Any] | None = None,
        *,
        k_width: int = 128,
        codes_per_byte: int = 1,
        out_dtype: Any | None = None,
    ) -> NDArray[Any]: ...

@overload
def op(
    which: Literal["add_layernorm"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AddLayernormOp: ...
@overload
def op(
    which: Literal["add_layernorm_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AddLayernormVjpOp: ...
@overload
def op(
    which: Literal["add_rmsnorm"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AddRmsnormOp: ...
@overload
def op(
    which: Literal["add_rmsnorm_quantize"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AddRmsnormQuantizeOp: ...
@overload
def op(
    which: Literal["add_rmsnorm_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AddRmsnormVjpOp: ...
@overload
def op(
    which: Literal["attention"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AttentionOp: ...
@overload
def op(
    which: Literal["attention_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> AttentionVjpOp: ...
@overload
def op(
    which: Literal["causal_conv1d"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> CausalConv1dOp: ...
@overload
def op(
    which: Literal["causal_conv1d_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> CausalConv1dVjpOp: ...
@overload
def op(
    which: Literal["cross_entropy"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> CrossEntropyOp: ...
@overload
def op(
    which: Literal["cross_entropy_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> CrossEntropyVjpOp: ...
@overload
def op(
    which: Literal["embedding"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> EmbeddingOp: ...
@overload
def op(
    which: Literal["embedding_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> EmbeddingVjpOp: ...
@overload
def op(
    which: Literal["geglu"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> GegluOp: ...
@overload
def op(
    which: Literal["geglu_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> GegluVjpOp: ...
@overload
def op(
    which: Literal["grouped_matmul"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> GroupedMatmulOp: ...
@overload
def op(
    which: Literal["grouped_matmul_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> GroupedMatmulVjpOp: ...
@overload
def op(
    which: Literal["kv_append"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> KvAppendOp: ...
@overload
def op(
    which: Literal["layernorm"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LayernormOp: ...
@overload
def op(
    which: Literal["layernorm_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LayernormVjpOp: ...
@overload
def op(
    which: Literal["linear"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LinearOp: ...
@overload
def op(
    which: Literal["linear_cross_entropy"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LinearCrossEntropyOp: ...
@overload
def op(
    which: Literal["linear_cross_entropy_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LinearCrossEntropyVjpOp: ...
@overload
def op(
    which: Literal["linear_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LinearVjpOp: ...
@overload
def op(
    which: Literal["logsumexp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LogsumexpOp: ...
@overload
def op(
    which: Literal["logsumexp_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> LogsumexpVjpOp: ...
@overload
def op(
    which: Literal["matmul"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> MatmulOp: ...
@overload
def op(
    which: Literal["matmul_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> MatmulVjpOp: ...
@overload
def op(
    which: Literal["merge_states"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> MergeStatesOp: ...
@overload
def op(
    which: Literal["merge_states_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> MergeStatesVjpOp: ...
@overload
def op(
    which: Literal["paged_attention"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> PagedAttentionOp: ...
@overload
def op(
    which: Literal["permute"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> PermuteOp: ...
@overload
def op(
    which: Literal["permute_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> PermuteVjpOp: ...
@overload
def op(
    which: Literal["quantize"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> QuantizeOp: ...
@overload
def op(
    which: Literal["rmsnorm"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RmsnormOp: ...
@overload
def op(
    which: Literal["rmsnorm_quantize"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RmsnormQuantizeOp: ...
@overload
def op(
    which: Literal["rmsnorm_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RmsnormVjpOp: ...
@overload
def op(
    which: Literal["rope"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RopeOp: ...
@overload
def op(
    which: Literal["rope_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RopeVjpOp: ...
@overload
def op(
    which: Literal["router"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RouterOp: ...
@overload
def op(
    which: Literal["router_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> RouterVjpOp: ...
@overload
def op(
    which: Literal["scaled_grouped_matmul"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> ScaledGroupedMatmulOp: ...
@overload
def op(
    which: Literal["scaled_matmul"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> ScaledMatmulOp: ...
@overload
def op(
    which: Literal["softmax"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> SoftmaxOp: ...
@overload
def op(
    which: Literal["softmax_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> SoftmaxVjpOp: ...
@overload
def op(
    which: Literal["swiglu"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> SwigluOp: ...
@overload
def op(
    which: Literal["swiglu_quantize"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> SwigluQuantizeOp: ...
@overload
def op(
    which: Literal["swiglu_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> SwigluVjpOp: ...
@overload
def op(
    which: Literal["top_k"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> TopKOp: ...
@overload
def op(
    which: Literal["top_k_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> TopKVjpOp: ...
@overload
def op(
    which: Literal["unpermute"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> UnpermuteOp: ...
@overload
def op(
    which: Literal["unpermute_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> UnpermuteVjpOp: ...
@overload
def op(
    which: Literal["varlen_attention"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> VarlenAttentionOp: ...
@overload
def op(
    which: Literal["varlen_attention_vjp"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> VarlenAttentionVjpOp: ...
@overload
def op(
    which: Literal["weight_only_matmul"],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> WeightOnlyMatmulOp: ...
@overload
def op(
    which: str | Spec[Any],
    *,
    backend: str | Backend | None = None,
    variant: str | None = None,
    tiling: Mapping[str, int] | None = None,
) -> Op:
    """Get an op by name. The result is callable.

    Args:
      which: the op's name (see :func:`portakern.ops`), or its spec.
      backend: a backend's name or object; a call runs on this backend or raises. None: chosen per call from the arrays
        (PyTorch on an NVIDIA or AMD GPU: triton; JAX on a TPU: pallas; a CPU: the float64 oracle, which is slow and
        logs this once).
      variant: a variant of the backend, by the name in ``explain()``. None: the first in the declared order that
        supports the call.
      tiling: tile sizes and launch parameters that replace the defaults; powers of two within the declared ranges
        (num_stages: any integer). ``portakern show OP`` lists them.

    Raises:
      SpecError: an unknown op, backend, variant or tile.
    """
