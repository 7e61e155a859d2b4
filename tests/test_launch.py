"""Kept launches: the key is at least as fine as Triton's, and what runs is what Triton would run."""

import collections
import importlib
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portakern.core.targets import Target

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from portakern.backends.triton import launch as launching  # noqa: E402
from portakern.backends.triton import launcher  # noqa: E402
from portakern.backends.triton.capture import Capture, capturing  # noqa: E402
from portakern.backends.triton.plan import LaunchPlan, Step  # noqa: E402


@triton.jit
def kernel(
    x, y, extra, n, m, stride, scale, flag, block: tl.constexpr, dtype: tl.constexpr, whole: tl.constexpr = True
):
    tl.store(y + tl.arange(0, block), tl.load(x + tl.arange(0, block)) * scale)


NAMES = [p.name for p in kernel.params]
MEMORY = {d: torch.zeros(80, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)}
TENSORS = [t[i:] for t in MEMORY.values() for i in (0, 1, 8, 2)] + [MEMORY[torch.float32].view(8, 10).T]
NUMBERS = [
    0, 1, 2, 3, 15, 16, 17, 32, 256, -1, -15, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40 + 1,
    2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**31) - 1,
]  # fmt: skip
PAIR = collections.namedtuple("PAIR", ["first", "second"])
TUPLES = [(a, b) for a in (None, 0.5, True, TENSORS[0], TENSORS[1], *NUMBERS) for b in (7, 16, 1)]
TUPLES += [PAIR(*t) for t in TUPLES[::5]] + [(t, 16) for t in TUPLES[::7]] + [(16,), (16, 16, 16), ()]
EXTRAS = [None, True, False, 1.0, 0.5, -0.0, *TENSORS, *NUMBERS, *TUPLES]
OPTIONS = {
    "block": [16, 32],
    "dtype": [tl.float32, tl.float64],
    "whole": [True, False],
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}


@pytest.fixture
def host(monkeypatch):
    """The driver's part, on a machine without one: CPU tensors are on device -1, and so are we."""
    monkeypatch.setattr(launcher, "current_device", lambda: -1)
    monkeypatch.setattr(launcher, "current_stream", lambda index: 77)
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launcher, "_warned", set())
    yield


class Keys:
    """Stands in for the dict of kept kernels, and writes down what is asked of it."""

    def get(self, key):
        self.key, self.launched = key, None
        return self.run, "function", "metadata"

    def run(self, *args):
        self.launched = args


def key_of(args, options, hip=False):
    types = [type(a) for a in args], {n: type(v) for n, v in options.items()}
    keys = Keys()
    launcher.write_launcher(kernel, *types, keys, hip)(3, *args, **options)
    return (*types[0], *types[1], *types[1].values()), keys.key, keys.launched


def triton_backend(hip):
    target = GPUTarget("hip", "gfx942", 64) if hip else GPUTarget("cuda", 90, 32)
    return triton.compiler.make_backend(target)


def triton_key(args, options, backend):
    """What Triton's own launch looks its binaries up under, and the arguments that it passes on."""
    bound, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **options
    )
    return (tuple(specialization), str(rest)), tuple(bound.values())


def clashes(calls, hip=False):
    """Pairs of calls that share a key of ours and not Triton's; and how many shared one at all."""
    backend, found, seen, shared = triton_backend(hip), [], {}, 0
    for args, options in calls:
        types, key, _ = key_of(args, options, hip)
        theirs, _ = triton_key(args, options, backend)
        before = seen.setdefault((types, key), (theirs, args, options))
        shared += before[1] is not args
        if before[0] != theirs:
            found.append((before, (theirs, args, options)))
    return found, shared


def one_at_a_time():
    """Every value in every place beside a fixed call."""
    base = [TENSORS[0], TENSORS[0], None, 48, 7, 16, 0.5, True]
    fixed = {n: v[0] for n, v in OPTIONS.items()}
    pools = [TENSORS, TENSORS, EXTRAS, NUMBERS, EXTRAS, NUMBERS, [0.5, 1.0, 1, 2, None], [True, False, 1, 0, None]]
    for i, pool in enumerate(pools):
        yield from (([*base[:i], v, *base[i + 1 :]], fixed) for v in pool)
    for n, pool in OPTIONS.items():
        yield from ((base, {**fixed, n: v}) for v in pool)
    yield base, {n: v for n, v in fixed.items() if n != "whole"}


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "hip"])
def test_calls_of_one_key_have_one_binary(host, hip):
    found, shared = clashes(one_at_a_time(), hip)
    assert not found and shared > 100


CALLS = st.tuples(
    st.tuples(
        *map(
            st.sampled_from,
            [TENSORS, TENSORS, EXTRAS, NUMBERS, NUMBERS[:12], NUMBERS, [0.5, 1.0, 7, 1], [True, False, None]],
        )
    ),
    st.fixed_dictionaries({n: st.sampled_from(v) for n, v in OPTIONS.items()}),
)


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "hip"])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(call=CALLS, data=st.data())
def test_drawn_calls_of_one_key_have_one_binary(host, hip, call, data):
    """Beside a drawn call: calls in which some arguments are others of the same key of ours, one by one and all
    together.
    """
    args, options = call
    key = key_of(args, options, hip)[1]
    near = []
    for i, a in enumerate(args):
        pool = TENSORS if isinstance(a, torch.Tensor) else [n for n in EXTRAS if type(n) is type(a)]
        near.append([a, *(v for v in pool if key_of([*args[:i], v, *args[i + 1 :]], options, hip)[1] == key)])
    both = [data.draw(st.sampled_from(pool)) for pool in near]
    found, _ = clashes([call, (both, options)], hip)
    assert not found


WEAKER = {
    "pointer alignment": ("not x.data_ptr() & 15", "0"), "pointer dtype": ("y.dtype", "0"),
    "integers of 1": ("n == 1", "False"), "integer alignment": ("n & 15 and", "1 and"),
    "wide integers": ("< 2147483648 else", "< 2**100 else"), "negative integers": ("0 <= (", "-2**100 <= ("),
    "a tuple": ("_inside(extra, False)", "0"), "a constexpr": (", dtype,", ","),
    "an option": ("num_warps, num_stages)", "num_stages)"),
}  # fmt: skip


@pytest.mark.parametrize("weaker", WEAKER)
def test_a_weaker_key_would_be_seen(host, monkeypatch, weaker):
    whole, (part, replaced), replacements = launcher._source, WEAKER[weaker], []

    def source(*args):
        head, _, tail = whole(*args).partition("_key = ")
        replacements.append(part in tail)
        return head + "_key = " + tail.replace(part, replaced, 1)

    monkeypatch.setattr(launcher, "_source", source)
    assert clashes(one_at_a_time())[0] and any(replacements)


def test_a_storage_of_two_gib_has_its_own_binary_on_amd(host):
    small, large = torch.zeros(64, dtype=torch.int8), torch.empty(2**31, dtype=torch.int8)[:64]
    call = [TENSORS[0], None, 48, 7, 16, 0.5, True]
    assert (
        key_of([small, *call], {"block": 16, "dtype": tl.float32}, True)[1]
        != key_of([large, *call], {"block": 16, "dtype": tl.float32}, True)[1]
    )
    assert not clashes([([t, *call], {"block": 16, "dtype": tl.float32}) for t in (small, large)], True)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"block": 16, "dtype": tl.float32, "num_warps": 4},
        {"num_stages": 2, "whole": False, "dtype": tl.float32, "block": 16},
    ],
)
def test_a_kept_launch_passes_what_triton_passes(host, options):
    args = [TENSORS[0], TENSORS[5], None, 48, 7, 16, 0.5, True]
    launched = key_of(args, options)[2]
    assert launched[:9] == (3, 1, 1, 77, "function", "metadata", None, None, None)
    theirs = triton_key(args, options, triton_backend(False))[1]
    assert len(theirs) == len(NAMES) and all(a is b for a, b in zip(launched[9:], theirs, strict=True))


class Compiled:
    """A compiled kernel as Triton's launch hands it back."""

    function, packed_metadata = 5, (4, 1, 0)

    def __init__(self):
        self.launches = []

    def run(
        self,
        gridX,
        gridY,
        gridZ,
        stream,
        function,
        kernel_metadata,
        launch_metadata,
        launch_enter_hook,
        launch_exit_hook,
        *args,
    ):
        self.launches.append((gridX, gridY, gridZ, stream, function, kernel_metadata, args))


class Bare(Compiled):
    def run(self, gridX, gridY, gridZ, stream, function, *args):
        self.launches.append(args)


class Call:
    interpret = False
    target = Target("cuda", "sm_90")


@pytest.fixture
def by_triton(host, monkeypatch):
    """The launches that went through Triton's own path."""
    launches = []

    def launch_by_triton(self, grid):
        def run(*args, **kwargs):
            launches.append((grid, args, kwargs))
            return launches.compiled()

        return run

    class Launches(list):
        compiled = Compiled

    launches = Launches()
    monkeypatch.setattr(JITFunction, "__getitem__", launch_by_triton)
    return launches


def go(x=TENSORS[0], n=48, **options):
    launching.launch(
        kernel,
        3,
        Call,
        x,
        TENSORS[0],
        None,
        n,
        7,
        16,
        0.5,
        True,
        **{"block": 16, "dtype": tl.float32, "num_warps": 4, **options},
    )


@pytest.mark.parametrize("compiled", [Compiled, Bare])
def test_the_first_launch_of_a_key_is_tritons_and_later_ones_are_kept(by_triton, compiled):
    made = []
    by_triton.compiled = lambda: made.append(compiled()) or made[-1]
    go()
    assert [grid for grid, _, _ in by_triton] == [(3,)] and not made[0].launches
    go(n=80), go(n=96)
    assert len(by_triton) == 1 and len(made[0].launches) == 2
    for other in (
        {"n": 81},
        {"n": 1},
        {"n": 2**31},
        {"x": TENSORS[1]},
        {"x": TENSORS[4]},
        {"block": 32},
        {"num_warps": 8},
        {"num_stages": 2},
    ):
        before = len(by_triton)
        go(**other), go(**other)
        assert len(by_triton) == before + 1


CONSTEXPRS = {"block": 16, "dtype": tl.float32, "num_warps": 4, "whole": True}
REST = (48, 7, 16, 0.5, True)


def planned():
    """The plan of one launch, of x and y."""
    step = Step(kernel, 3, ("x", "y", None), REST, CONSTEXPRS, {}, None)
    return LaunchPlan(Call(), -1, ("x", "y"), [], {}, [step], (), None, None)


def test_a_plan_has_a_function_for_every_placement_of_its_arrays(by_triton):
    made = []
    by_triton.compiled = lambda: made.append(Compiled()) or made[-1]
    x, y, plan = TENSORS[0], TENSORS[4], planned()
    for _ in range(3):
        plan.serve({"x": x, "y": y})
    assert len(by_triton) == 1 and len(made[0].launches) == 2
    launching.launch(kernel, 3, Call, x, y, None, *REST, **CONSTEXPRS)
    first, second, third = ([a.data_ptr() if torch.is_tensor(a) else a for a in args] for *_, args in made[0].launches)
    assert first == second == third and len(by_triton) == 1
    (cached,) = plan.cached.values()
    off = torch.empty(49)[1:]
    for other in ((off, y), (x, off.to(y.dtype)[1:]), (off, off.to(y.dtype)[1:])):
        before = len(by_triton)
        for _ in range(3):
            cached(dict(zip(("x", "y"), other, strict=True)))
        assert len(by_triton) == before + 1 and len(made[-1].launches) == 2
    for serve in plan.cached.values():  # each knows what it is for
        serve({"x": x, "y": y})
    assert len(made[0].launches) == 3 + 4 and len(by_triton) == 4


def test_on_amd_a_plan_has_a_function_for_storages_that_buffer_instructions_reach(by_triton, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    made = []
    by_triton.compiled = lambda: made.append(Compiled()) or made[-1]
    small, large = torch.zeros(64, dtype=torch.int8), torch.empty(2**31, dtype=torch.int8)[:64]
    plan, calls = planned(), [{"x": small, "y": small}, {"x": large, "y": small}, {"x": small, "y": large}]
    for n, arrays in enumerate(calls, 1):
        for _ in range(3):
            plan.serve(arrays)
        assert len(by_triton) == n == len(plan.cached) and len(made[-1].launches) == 2
    for cached in list(plan.cached.values()):
        for n, arrays in enumerate(calls):
            before = len(made[n].launches)
            cached(arrays)
            assert len(made[n].launches) == before + 1
    with monkeypatch.context() as m:
        m.setattr(knobs.amd, "use_buffer_ops", not knobs.amd.use_buffer_ops)
        cached(calls[0]), cached(calls[0])
        assert len(by_triton) == 4 == len(plan.cached)
    cached(calls[0])
    assert len(by_triton) == 4


def test_a_kept_launch_tells_tuples_apart(by_triton):
    made = []
    by_triton.compiled = lambda: made.append(Compiled()) or made[-1]
    go(n=(48, None, (0.5, 7))), go(n=(80, None, (2.5, 9)))
    assert len(by_triton) == 1 and made[0].launches[0][-1][3] == (80, None, (2.5, 9))
    for other in (
        (48, 1, (0.5, 7)),
        (49, None, (0.5, 7)),
        (48, None, (0.5, 16)),
        (48, None, (None, 7)),
        (48, None),
        (),
    ):
        before = len(by_triton)
        go(n=other), go(n=other)
        assert len(by_triton) == before + 1


VENDORS = {"nvidia": "CudaLauncher", "amd": "HIPLauncher"}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_direct_launch_passes_what_tritons_launcher_does(vendor, monkeypatch):
    its = getattr(importlib.import_module(f"triton.backends.{vendor}.driver"), VENDORS[vendor])
    monkeypatch.setattr(triton.runtime.driver, "_active", object())
    run = its.__new__(its)
    seen, sizes = [], ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
    vars(run).update(dict.fromkeys(sizes, 0), num_ctas=1, gsan_enabled=False, launch=lambda *args: seen.append(args))
    others = ("launch_cooperative_grid", "launch_pdl", "warp_size", "arg_annotations", "kernel_signature")
    vars(run).update({name: name for name in others})
    for rest in ([7, 16], []):
        text, env = launcher.launching("go", (run, "function", "metadata"), 3, ["at_x", None], rest)
        eval(text, env | {"stream": 77, "at_x": 4096})
        run(3, 1, 1, 77, "function", "metadata", None, None, None, 4096, None, *rest)
        assert seen[0] == seen[1] and env["go"] is not run, "not by way of __call__"
        seen.clear()
    for asks in ({"profile_scratch_size": 16}, {"gsan_enabled": True}):  # what __call__ sees to
        vars(run).update(asks)
        monkeypatch.setattr(its, "__call__", lambda self, *args: seen.append(("whole", *args)))
        text, env = launcher.launching("go", (run, "function", "metadata"), 3, ["at_x", None], [7])
        eval(text, env | {"stream": 77, "at_x": 4096})
        assert seen.pop() == ("whole", 3, 1, 1, 77, "function", "metadata", None, None, None, 4096, None, 7)
        vars(run).update(profile_scratch_size=0, gsan_enabled=False)


def test_a_launcher_that_is_not_understood_is_called_whole():
    class New:
        def __call__(self, gridX, gridY, gridZ, stream, function, *args):
            self.fence()
            self.launch(gridX, gridY, gridZ, stream, function, *args)

        def fence(self):
            self.fenced = True

        def launch(self, *args):
            self.launched = args

    run = New()
    text, env = launcher.launching("go", (run, "function", "metadata"), 3, ["at_x"], [7])
    eval(text, env | {"stream": 77, "at_x": 4096})
    assert run.fenced and run.launched == (3, 1, 1, 77, "function", "metadata", None, None, None, 4096, 7)


def test_who_captures_records_or_watches_sees_the_launches_of_plans(by_triton, monkeypatch):
    arrays, plan, seen = {"x": TENSORS[0], "y": TENSORS[0]}, planned(), []
    for _ in range(3):
        plan.serve(arrays)
    with launching.recording(lambda *told: seen.append(told)):
        plan.serve(arrays)
    assert len(seen) == 1 and seen[0][1] == 3 and seen[0][2][3:] == REST and len(by_triton) == 1
    capture = Capture()
    with capturing(capture):
        plan.serve(arrays)
    assert [launch.grid for launch in capture.launches] == [3] and len(by_triton) == 1
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as m:
            m.setattr(knobs.runtime, name, lambda metadata: None)
            plan.serve(arrays)
    with monkeypatch.context() as m:
        m.setattr(kernel, "pre_run_hooks", [lambda *args: None])
        plan.serve(arrays)
    assert len(by_triton) == 4
    plan.serve(arrays)
    assert len(by_triton) == 4


def test_a_plan_enters_the_device_of_its_arrays(by_triton, monkeypatch):
    entered, here = [], [-1]
    monkeypatch.setattr(launcher, "current_device", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or Entering(here))
    plan = planned()
    for _ in range(3):
        plan.serve({"x": TENSORS[0], "y": TENSORS[0]})
    assert not entered
    here[0] = 0
    plan.serve({"x": TENSORS[0], "y": TENSORS[0]})
    assert entered == [-1] and here == [0] and len(by_triton) == 1


class Entering:
    """Makes -1 the current device while inside."""

    def __init__(self, here):
        self.here = here

    def __enter__(self):
        self.before, self.here[0] = self.here[0], -1

    def __exit__(self, *error):
        self.here[0] = self.before


def test_compile_errors_surface_every_time(by_triton):
    def fail():
        raise triton.runtime.errors.OutOfResources(300000, 232448, "shared memory")

    by_triton.compiled = fail
    for _ in range(2):
        with pytest.raises(triton.runtime.errors.OutOfResources):
            go()
    by_triton.compiled = Compiled
    go(), go()
    assert len(by_triton) == 3


def test_who_watches_launches_sees_them(by_triton, monkeypatch):
    go(), go()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as m:
            m.setattr(knobs.runtime, name, lambda metadata: None)
            before = len(by_triton)
            go(), go()
            assert len(by_triton) == before + 2
    with monkeypatch.context() as m:
        m.setattr(knobs.runtime, "debug", True)
        go(num_warps=2), go(num_warps=2)
        assert len(by_triton) == 7
    go(num_warps=2), go(num_warps=2)  # what was compiled with asserts is not kept
    assert len(by_triton) == 8


def test_another_current_device_is_entered_for_the_launch(by_triton, monkeypatch):
    entered, here = [], [0]

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            self.before, here[0] = here[0], self.index

        def __exit__(self, *error):
            here[0] = self.before

    monkeypatch.setattr(launcher, "current_device", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    go(), go()
    assert entered == [-1, -1] and here == [0] and len(by_triton) == 1
    here[0] = -1
    go()
    assert entered == [-1, -1] and len(by_triton) == 1


@pytest.mark.parametrize("what", ["signature", "attribute", "argument"])
def test_what_a_kept_launch_does_not_know_is_launched_by_triton_and_said_once(by_triton, caplog, monkeypatch, what):
    options = {}
    if what == "signature":
        by_triton.compiled = type("Newer", (Compiled,), {"run": lambda self, grid, stream, *args: None})
    elif what == "attribute":
        by_triton.compiled = type("Newer", (), {"run": Compiled().run})
    else:
        monkeypatch.setattr(torch.cuda, "device", lambda index: __import__("contextlib").nullcontext())
        options = {"n": [1, 2]}
    with caplog.at_level(logging.WARNING, "portakern"):
        for _ in range(3):
            go(**options)
    assert len(by_triton) == 3 and caplog.text.count("launched by Triton's own path") == 1
