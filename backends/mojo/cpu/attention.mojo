"""Softmax attention with grouped queries, masks, biases, softcap and sinks.

    s_j = softcap(scale q k_j) - slope |distance_j| + bias_j        p_j = exp(s_j - m), m = max s_j, l = sum_j p_j
    o = sum_j p_j v_j / l        lse = m + log l

A thread takes a block of a head's queries: their scores with all keys that some of them see are one product, each row
of them becomes weights, and the weights times v another product. A row's sum begins at the first key that the row
sees, so that its bits do not depend on the queries beside it.
"""

from std.math import iota

from lib.arrays import At, Layout, Rows
from lib.exponential import exp, log
from lib.exponentials import InTwo
from lib.products import COLUMNS, ROWS, Extents, Left, multiply_panels, multiply_tile
from lib.strips import LANES, Strip, load, store, tree_sum


@fieldwise_init
struct Heads(TrivialRegisterPassable):
    """The extents of a call."""

    var heads: Int
    var group: Int
    var q_len: Int
    var kv_len: Int
    var d: Int
    var dv: Int


@fieldwise_init
struct Scores(TrivialRegisterPassable):
    """How a score is made of a dot. ``cap``: 0 for none, and then ``scale`` is that of dots over it."""

    var scale: Float64
    var cap: Float64
    var bias: Int
    var slopes: Int
    var sinks: Int


@fieldwise_init
struct Masks(TrivialRegisterPassable):
    """Which keys a query sees: query i stands beside key i + ``first``, and sees ``left`` and ``right`` of there, and
    of these the keys of its segment."""

    var first: Int
    var left: Int
    var right: Int
    var q_segments: Int
    var kv_segments: Int

    @always_inline
    def begin(self, i: Int, kv_len: Int) -> Int:
        return min(max(i + self.first - self.left, 0), kv_len)

    @always_inline
    def end(self, i: Int, kv_len: Int) -> Int:
        return max(min(i + self.first + self.right + 1, kv_len), self.begin(i, kv_len))


@always_inline
def tanh[acc: DType](x: Strip[acc]) -> Strip[acc]:
    return 1 - 2 / (exp(2 * x) + 1)


def score_row[acc: DType](
    s: At[acc], to: Scores, see: Masks, e: Heads, head: Int, i: Int, begin: Int, n: Int, space: At[acc]
):
    """Make scores of the dots of query i with the n keys from ``begin`` on; what it does not see is -inf."""
    var row, scale = head * e.q_len + i, to.scale.cast[acc]()
    var batch, cap = head // e.heads, to.cap.cast[acc]()
    var bias = s
    if to.bias:
        bias = Rows(Layout(unsafe_from_address=to.bias)).read(row, n, space, begin)
    for j in range(0, n, LANES[acc]):
        var x = load(s, j, n, 0) * scale
        if to.cap != 0:
            x = cap * tanh(x)
        if to.slopes:
            var slope = At[acc](unsafe_from_address=to.slopes)[unsafe_offset=head % e.heads]
            x -= slope * abs(Scalar[acc](i + see.first - begin - j) - iota[acc, LANES[acc]]())
        if to.bias:
            x += load(bias, j, n, 0)
        if see.q_segments:
            var own = At[DType.int64](unsafe_from_address=see.q_segments)[unsafe_offset=batch * e.q_len + i]
            var ids = At[DType.int64](unsafe_from_address=see.kv_segments).unsafe_offset(batch * e.kv_len + begin + j)
            var seen = SIMD[DType.bool, LANES[acc]](fill=False)
            for lane in range(min(LANES[acc], n - j)):
                seen[lane] = ids[unsafe_offset=lane] == own
            x = seen.select(x, Strip[acc](Scalar[acc].MIN))
        store(s, j, n, x)


def weigh_row[acc: DType](s: At[acc], n: Int, sinks: Int, head: Int, place: Int, lse: InTwo) -> Scalar[acc]:
    """Make weights p of n scores, and return what their sum with v is multiplied by, 1 / l; 0 where nothing is seen."""
    var top = Strip[acc](Scalar[acc].MIN)
    for j in range(0, n, LANES[acc]):
        var x = load(s, j, n, Scalar[acc].MIN)
        top = x.gt(top).select(x, top)
    var m = top.reduce_max()
    var sink = At[acc](unsafe_from_address=sinks)[unsafe_offset=head] if sinks else Scalar[acc].MIN
    m = sink if sink > m else m
    var shift = m if m > Scalar[acc].MIN else 0
    var total = Strip[acc](0)
    for j in range(0, n, LANES[acc]):
        var p = exp(load(s, j, n, Scalar[acc].MIN) - shift)
        total += p
        store(s, j, n, p)
    var l = tree_sum(total) + exp[acc, 1](sink - shift)
    lse.put[acc](place, m.cast[DType.float64](), log(l.cast[DType.float64]()))
    return 1 / l if l != 0 else 0


@fieldwise_init
struct Block[acc: DType](TrivialRegisterPassable):
    """Memory of a block of queries: their scores, their results, a row of biases, a factor for each."""

    var scores: At[Self.acc]
    var o: At[Self.acc]
    var bias: At[Self.acc]
    var shares: At[Self.acc]
    var width: Int
    var dv: Int

    def __init__(out self, space: Int, block_q: Int, e: Heads):
        self.width = (e.kv_len + COLUMNS[Self.acc] - 1) // COLUMNS[Self.acc] * COLUMNS[Self.acc]
        self.dv = (e.dv + COLUMNS[Self.acc] - 1) // COLUMNS[Self.acc] * COLUMNS[Self.acc]
        self.scores = At[Self.acc](unsafe_from_address=space)
        self.o = self.scores.unsafe_offset(block_q * self.width)
        self.bias = self.o.unsafe_offset(block_q * self.dv)
        self.shares = self.bias.unsafe_offset(self.width)


def weigh_values[acc: DType](
    at: Block[acc], v: At[acc], e: Heads, rows: Int, first: Int, last: Int, block_kv: Int
):
    """Add up o = p v over the keys from ``first`` to ``last``, ``block_kv`` at a time."""
    for start in range(first, last, block_kv):
        var keys = min(block_kv, last - start)
        for j in range(0, e.dv, COLUMNS[acc]):
            var panel = v.unsafe_offset(j * e.kv_len + start * COLUMNS[acc])
            for i in range(0, rows, ROWS):
                var p = Left[acc](at.scores.unsafe_offset(i * at.width + start - first), at.width)
                multiply_panels[acc, False](
                    p, panel, at.o.unsafe_offset(i * at.dv + j), at.dv, keys, start > first
                )


def attend[acc: DType](
    q: At[acc], k: At[acc], v: At[acc], o: Rows, lse: InTwo, e: Heads, to: Scores, see: Masks, head: Int,
    begin: Int, rows: Int, at: Block[acc], block_kv: Int
):
    """One block: ``rows`` queries of a head of a batch entry, from ``begin`` on."""
    var first = see.begin(begin, e.kv_len) // COLUMNS[acc] * COLUMNS[acc]
    var last = max(see.end(begin + rows - 1, e.kv_len), first)
    multiply_tile(q, k, at.scores, Extents(begin + rows, last, e.d, rows, at.width, e.d), begin, first)
    for i in range(rows):
        var s, query = at.scores.unsafe_offset(i * at.width), begin + i
        var own, end = see.begin(query, e.kv_len), see.end(query, e.kv_len)
        var seen = s.unsafe_offset(own - first)
        score_row(seen, to, see, e, head, query, own, end - own, at.bias)
        at.shares[unsafe_offset=i] = weigh_row(seen, end - own, to.sinks, head % e.heads, head * e.q_len + query, lse)
        for j in range(own - first):
            s[unsafe_offset=j] = 0
        for j in range(end - first, last - first):
            s[unsafe_offset=j] = 0
    weigh_values(at, v, e, rows, first, last, block_kv)
    for i in range(rows):
        var row, share = at.o.unsafe_offset(i * at.dv), at.shares[unsafe_offset=i]
        for j in range(0, e.dv, LANES[acc]):
            var sum = load(row, j, e.dv, 0) if last > first else Strip[acc](0)
            store(row, j, e.dv, sum * share)
        o.copy(row, head * e.q_len + begin + i, 0, e.dv)


def attention_blocks[acc: DType](
    q: Int, k: Int, v: Int, o: Rows, lse: InTwo, e: Heads, to: Scores, see: Masks, block_q: Int, block_kv: Int,
    space: Int, first: Int, last: Int
):
    var at, down = Block[acc](space, block_q, e), (e.q_len + block_q - 1) // block_q
    var q_size = (e.q_len + ROWS - 1) // ROWS * ROWS * e.d
    for number in range(first, last):
        var head, begin = number // down, number % down * block_q
        var kv_head = head // e.group
        attend(
            At[acc](unsafe_from_address=q).unsafe_offset(head * q_size),
            At[acc](unsafe_from_address=k).unsafe_offset(kv_head * at.width * e.d),
            At[acc](unsafe_from_address=v).unsafe_offset(kv_head * at.dv * e.kv_len),
            o, lse, e, to, see, head, begin, min(block_q, e.q_len - begin), at, block_kv,
        )


@export("attention")
def attention(
    q: Int, k: Int, v: Int, o: Layout, lse: Int, low: Int, bias: Int, slopes: Int, sinks: Int, q_segments: Int,
    kv_segments: Int, scale: Float64, cap: Float64, start: Int, left: Int, right: Int, double: Int, heads: Int,
    group: Int, q_len: Int, kv_len: Int, d: Int, dv: Int, block_q: Int, block_kv: Int, space: Int, first: Int, last: Int
) abi("C"):
    var e, to = Heads(heads, group, q_len, kv_len, d, dv), Scores(scale, cap, bias, slopes, sinks)
    var see = Masks(start, left, right, q_segments, kv_segments)
    comptime for acc in [DType.float32, DType.float64]:
        if Bool(double) == (acc == DType.float64):
            attention_blocks[acc](
                q, k, v, Rows(o), InTwo(lse, low), e, to, see, block_q, block_kv, space, first, last
            )
