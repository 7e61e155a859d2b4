"""Tensor descriptors on the launch path: keys, kept maps, plans, and tiles in the interpreter."""

import concurrent.futures
import importlib
import threading
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from portakern.backends.triton import descriptors, interpreter, launcher  # noqa: E402
from portakern.backends.triton import launch as launching  # noqa: E402
from portakern.backends.triton.plan import LaunchPlan, Step  # noqa: E402


@triton.jit
def moved(x, y, n, rows: tl.constexpr, columns: tl.constexpr):
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        y.store([0, i * rows, 0], x.load([0, i * rows, 8]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_interpreted_tiles_end_where_the_array_ends(dtype):
    x = torch.arange(2 * 7 * 40).reshape(2, 7, 40).to(dtype)
    y = torch.full((1, 9, 24), -1.0, dtype=dtype)
    described = descriptors.describe(x, x.shape, x.stride(), (1, 4, 16))
    # of y six rows of 20 are described
    onto = descriptors.describe(y, (1, 6, 20), y.stride(), (1, 4, 16))
    interpreter.run(moved, 1, described, onto, 2, rows=4, columns=16)
    assert torch.equal(y[0, :6, :16], x[0, :6, 8:24])
    assert (y[0, 6:] == -1).all() and (y[..., 16:] == -1).all()
    wide = descriptors.describe(x, x.shape, x.stride(), (1, 8, 64))
    tile = interpreter.Described(wide, tl.float32 if dtype == torch.float32 else tl.float16)
    whole = tile.load([0, 0, 8]).handle.data
    assert whole.shape == (1, 8, 64) and not whole[0, 7:].any() and not whole[0, :, 32:].any()


class Call:
    interpret = False


OPTIONS = {"rows": 4, "columns": 16, "num_warps": 4}
MEMORY = torch.zeros(4096)


def pair(x=MEMORY, shape=(2, 8, 64), block=(1, 4, 16)):
    return (descriptors.describe(x, shape, (512, 64, 1), block),) * 2


class Launched(list):
    """A compiled kernel's launcher, in the place of Triton's."""

    function, packed_metadata = 5, (4, 1, 0)

    def run(self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
            launch_exit_hook, *args):  # fmt: skip
        self.append(args)


@pytest.fixture
def bound(monkeypatch):
    """The threads in which CUDA's runtime was called, each as often as it was."""
    threads = []
    event = types.SimpleNamespace(record=lambda: threads.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(descriptors, "_thread", descriptors._Thread())
    return threads


@pytest.fixture
def by_triton(monkeypatch, bound):
    """The kernels that went through Triton's own path."""
    monkeypatch.setattr(launcher, "current_device", lambda: -1)
    monkeypatch.setattr(launcher, "current_stream", lambda index: 77)
    monkeypatch.setattr(launching, "_launchers", {})
    first = []
    monkeypatch.setattr(
        type(moved), "__getitem__", lambda self, grid: lambda *args, **kwargs: first.append(Launched()) or first[-1]
    )
    return first


def test_the_key_is_what_the_tile_and_the_dtype_are(by_triton):
    for args in (pair(), pair(shape=(1, 6, 20)), pair(x=MEMORY[1024:])):  # neither extents nor the place matter
        launching.launch(moved, 3, Call, *args, 2, **OPTIONS)
    assert len(by_triton) == 1 and len(by_triton[0]) == 2
    for n, args in enumerate((pair(x=MEMORY.half()), pair(block=(1, 8, 16)), (pair()[0], MEMORY)), 2):
        launching.launch(moved, 3, Call, *args, 2, **OPTIONS)
        assert len(by_triton) == n


def test_a_plan_describes_the_tensors_that_it_is_given(by_triton):
    described = {i: descriptors.bare(d) for i, d in enumerate(pair())}
    step = Step(moved, 3, ("x", "y"), (2,), OPTIONS, described, None)
    elsewhere = []
    plan = LaunchPlan(Call(), -1, ("x", "y"), [], {}, [step], (), (True, True), elsewhere.append)
    other = torch.ones(4096)
    for x, y in ((MEMORY, MEMORY), (MEMORY, other), (other, MEMORY)):
        plan.serve({"x": x, "y": y})
    assert len(by_triton) == 1
    begins = [[d.base.data_ptr() for d in args[:2]] for args in by_triton[0]]
    assert begins == [[MEMORY.data_ptr(), other.data_ptr()], [other.data_ptr(), MEMORY.data_ptr()]]
    odd = {"x": MEMORY, "y": other[1:]}  # which no descriptor can describe
    plan.serve(odd)
    assert len(by_triton) == 1 and len(by_triton[0]) == 2 and elsewhere == [odd]


def flat(args):
    """A launcher's arguments: the kernel's own come one by one (3.6) or as a sequence."""
    *most, last = args
    return [*most, *(last if isinstance(last, (list, tuple)) and last[0] != "map" else [last])]


def direct(run, described):
    """A launch of three tensors and a number, as a function of the stream and of where they begin."""
    text, env = launcher.launching("go", (run, "function", "metadata"), 3, ["x", "y", "z"], [7], described)
    return eval(f"lambda stream, x, y, z: {text}", env)


def in_a_thread(call):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: (call(), threading.get_ident())[1]).result()


def test_every_thread_has_a_context_before_a_map_is_made_in_it(by_triton, bound):
    """Backward runs in threads of autograd, whose first call of CUDA may be the driver's that makes a map."""
    launch = lambda: launching.launch(moved, 3, Call, *pair(), 2, **OPTIONS)  # noqa: E731
    launch()
    mine = threading.get_ident()
    assert bound == [mine]
    other = in_a_thread(lambda: (launch(), launch()))
    assert bound == [mine, other]
    maps = descriptors.Maps(pair()[0], lambda described: [bound.copy(), *descriptors.Maps(described, None).rest])
    third = in_a_thread(lambda: maps[MEMORY.data_ptr()])
    assert bound == maps[MEMORY.data_ptr()] == [mine, other, third]
    fourth = in_a_thread(lambda: launcher._DescriptorsByAddress(pair()[0])[MEMORY.data_ptr()])
    assert bound == [mine, other, third, fourth]


def test_maps_are_kept_by_address(monkeypatch, bound):
    """The launcher of the Triton that is installed is passed what Triton passes it, and a map is made once."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    made, seen = [], []

    def fill(*args):
        made.append(args)
        return ("map", *map(str, args))

    utils = types.SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(utils=utils))
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 4, 16], "fp4_padded": False}
    signature = dict(enumerate(["tensordesc<fp32[1,4,16]>", "*fp32", "tensordesc<fp32[1,4,16]>", "i32"]))
    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(lambda *args: seen.append(args), signature, [meta, dict(meta)])
    sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    vars(run).update(dict.fromkeys(sizes, 0), num_ctas=1, gsan_enabled=False)
    others = ("launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")
    vars(run).update({name: name for name in others})
    x, y = pair()
    bare = {0: descriptors.bare(x), 2: descriptors.bare(y)}
    go = direct(run, bare)
    at = MEMORY.data_ptr()
    run(3, 1, 1, 77, "function", "metadata", None, None, None, x, 4096, y, 7)
    theirs, filled = seen.pop(), len(made)
    assert filled == 2
    for _ in range(3):
        go(77, at, 4096, at)
        assert flat(seen.pop()) == flat(theirs)
    assert len(made) == filled + 2
    go(77, at + 1024, 4096, at)
    assert len(made) == filled + 3 and made[-1][0] == at + 1024
    # where the release is built in another way, Triton makes the maps
    monkeypatch.setattr(launcher, "raw", lambda run, described: None)
    direct(run, bare)(77, at, 4096, at)
    assert flat(seen.pop()) == flat(theirs)


def test_maps_round_to_tf32_in_every_release(monkeypatch):
    x = descriptors.describe(MEMORY, (64, 64), (64, 1), (16, 32), tf32=True)
    plain = descriptors.describe(MEMORY, (64, 64), (64, 1), (16, 32))
    metas = [{"elem_type": 7}, {"elem_type": 7}]
    compiled = types.SimpleNamespace(metadata=types.SimpleNamespace(tensordesc_meta=metas))
    kernel = types.SimpleNamespace(warmup=lambda *args, grid, **constexprs: compiled)
    fields = dict(descriptors.TensorDescriptor.__dataclass_fields__)
    descriptors.mend_rounding(kernel, 3, (x, plain, 5), {})
    if "round_f32_to_tf32" in fields:  # Triton asks the descriptor itself
        assert x.round_f32_to_tf32 and [m["elem_type"] for m in metas] == [7, 7]
        fields.pop("round_f32_to_tf32")
        monkeypatch.setattr(descriptors.TensorDescriptor, "__dataclass_fields__", fields)
        descriptors.mend_rounding(kernel, 3, (x, plain, 5), {})
    assert [m["elem_type"] for m in metas] == [descriptors.TFLOAT32, 7]
