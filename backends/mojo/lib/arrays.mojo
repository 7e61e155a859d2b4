"""Arrays as they come from Python: a layout says where an array's rows lie and what their numbers are.

A layout is a run of 64-bit integers: address, code of the dtype, stride along the row, rank, then that many extents and
that many strides of the axes beside the row, outermost first. Strides count elements.
"""

comptime At[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
comptime Layout = At[DType.int64]
comptime DTYPES = [DType.float32, DType.float64, DType.bfloat16, DType.float16]
"""The dtype of each code, as ``CODES`` in launch.py has them."""


def code_of[dtype: DType]() -> Int:
    comptime for i in range(len(materialize[DTYPES]())):
        comptime if DTYPES[i] == dtype:
            return i
    return -1


struct Rows(TrivialRegisterPassable):
    """Rows of any strided array, of any float dtype, that are read and written as numbers of an accumulator."""

    var layout: Layout

    def __init__(out self, layout: Layout):
        self.layout = layout

    @always_inline
    def field(self, i: Int) -> Int:
        return Int(self.layout[unsafe_offset=i])

    @always_inline
    def code(self) -> Int:
        return self.field(1)

    @always_inline
    def stride(self) -> Int:
        return self.field(2)

    @always_inline
    def is_double(self) -> Bool:
        """Whether sums of its numbers are float64."""
        return self.code() == code_of[DType.float64]()

    def start(self, row: Int) -> Int:
        """The first element of a row, counted from the array's address."""
        var rank, rest, offset = self.field(3), row, 0
        for axis in range(rank - 1, 0, -1):
            var extent = self.field(4 + axis)
            offset += rest % extent * self.field(4 + rank + axis)
            rest //= extent
        return offset + rest * self.field(4 + rank) if rank else 0

    @always_inline
    def lies_as[acc: DType](self) -> Bool:
        """Whether a row is memory that needs no copy."""
        return self.code() == code_of[acc]() and self.stride() == 1

    @always_inline
    def at[dtype: DType](self, row: Int) -> At[dtype]:
        return At[dtype](unsafe_from_address=self.field(0)).unsafe_offset(self.start(row))

    def read[acc: DType](self, row: Int, n: Int, space: At[acc], column: Int = 0) -> At[acc]:
        """A row's n numbers, from a column on, side by side: where they lie, or widened and gathered into ``space``."""
        if self.lies_as[acc]():
            return self.at[acc](row).unsafe_offset(column)
        comptime for dtype in DTYPES:
            comptime if (dtype == DType.float64) == (acc == DType.float64):
                if self.code() == code_of[dtype]():
                    _copy(self.at[dtype](row).unsafe_offset(column * self.stride()), self.stride(), space, 1, n)
        return space

    @always_inline
    def place[acc: DType](self, row: Int, space: At[acc]) -> At[acc]:
        """Where a row is computed: in its place, or in ``space``, from which :meth:`write` takes it."""
        return self.at[acc](row) if self.lies_as[acc]() else space

    def write[acc: DType](self, row: Int, n: Int, space: At[acc]):
        """Round a row that was computed in its :meth:`place` to its dtype."""
        if not self.lies_as[acc]():
            self.copy(space, row, 0, n)

    def copy[acc: DType](self, x: At[acc], row: Int, column: Int, n: Int):
        """Round n numbers to the dtype of a row, from a column of it on. What is summed in float64 stays float64."""
        comptime for dtype in DTYPES:
            comptime if dtype == DType.float64 or acc != DType.float64:
                if self.code() == code_of[dtype]():
                    _copy(x, 1, self.at[dtype](row).unsafe_offset(column * self.stride()), self.stride(), n)

    def put[acc: DType](self, row: Int, value: Scalar[acc]):
        """Round a row's only number to its dtype."""
        comptime for dtype in DTYPES:
            comptime if (dtype == DType.float64) == (acc == DType.float64):
                if self.code() == code_of[dtype]():
                    self.at[dtype](row)[] = value.cast[dtype]()


def _copy[src: DType, dst: DType](x: At[src], x_stride: Int, y: At[dst], y_stride: Int, n: Int):
    comptime W = 32
    var done = 0
    if x_stride == 1 and y_stride == 1:
        while done + W <= n:
            y.unsafe_store(done, x.unsafe_load[width=W](done).cast[dst]())
            done += W
    for i in range(done, n):
        y[unsafe_offset=i * y_stride] = x[unsafe_offset=i * x_stride].cast[dst]()
