"""Hardware counters of a device, read with NVIDIA's Nsight Compute: ``ncu`` runs a process that makes one call, and
prints the counters as comma-separated values.

The format of its output and its options are those of the Nsight Compute CLI's documentation
(https://docs.nvidia.com/nsight-compute/NsightComputeCli), and the metrics' names those of its Profiling Guide.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "COUNTED",
    "MISSING",
    "PLATFORM",
    "STALLS",
    "Counted",
    "HardwareCounter",
    "NotCounted",
    "collect",
    "find",
    "parse",
]


@dataclass(frozen=True)
class HardwareCounter:
    """A fact that comes from a hardware counter.

    Attributes:
      name, unit: as they are shown.
      metrics: those of Nsight Compute that say it, best first: chips differ in what they have.
      summed: over the launches of a kernel; otherwise it is a mean, by their times.
    """

    name: str
    unit: str
    metrics: tuple[str, ...]
    summed: bool = False


TIME = "gpu__time_duration.sum"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

STALLS = {
    "long_scoreboard": "loads from device memory or L2",
    "short_scoreboard": "shared memory or special functions",
    "lg_throttle": "the queue of loads and stores",
    "mio_throttle": "the queue of shared memory",
    "math_pipe_throttle": "a busy arithmetic unit",
    "gmma": "asynchronous matrix instructions",
    "barrier": "other warps at a barrier",
    "membar": "a memory fence",
    "wait": "the fixed latency of the previous instruction",
    "no_instruction": "instruction fetches",
    "not_selected": "other warps that issue (no loss)",
    "sleeping": "the end of a sleep instruction",
    "drain": "stores to drain at the end",
    "imc_miss": "the cache of constants",
    "branch_resolving": "a branch",
    "dispatch_stall": "the dispatcher",
    "tex_throttle": "the queue of the texture unit",
    "misc": "something else",
}
"""Reasons for which a warp does not issue -> what it waits for."""

COUNTED: Mapping[str, HardwareCounter] = {
    "time": HardwareCounter("time", "us", (TIME,), summed=True),
    "occupancy": HardwareCounter("occupancy reached", "%", ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
    "read": HardwareCounter("read from device memory", "bytes", ("dram__bytes_read.sum",), summed=True),
    "written": HardwareCounter("written to device memory", "bytes", ("dram__bytes_write.sum",), summed=True),
    "memory": HardwareCounter(
        "device memory", "% of its peak", ("dram__throughput.avg.pct_of_peak_sustained_elapsed",)
    ),
    "l2": HardwareCounter("L2 cache", "% of its peak", ("lts__throughput.avg.pct_of_peak_sustained_elapsed",)),
    "l1": HardwareCounter(
        "L1 and shared memory", "% of its peak", ("l1tex__throughput.avg.pct_of_peak_sustained_active",)
    ),
    "matrix": HardwareCounter(
        "matrix units", "% of their peak",
        ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
         "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"),
    ),
    "issue": HardwareCounter(
        "issued instructions", "% of the peak", ("smsp__issue_active.avg.pct_of_peak_sustained_active",)
    ),
    **{reason: HardwareCounter(f"waits for {what}", "warps an issue", (STALL.format(reason),))
       for reason, what in STALLS.items()},
}  # fmt: skip

LIMITS = ("memory", "matrix", "l2", "l1", "issue")
"""The counted facts that are shares of a peak: whichever comes near its own bounds the kernel."""

TO_BASE = {
    "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12, "kib": 2.0**10, "mib": 2.0**20,
    "gib": 2.0**30,
}  # fmt: skip
"""Unit of a metric, in small letters -> what one of them is in microseconds or bytes."""

ATTEMPTS = 4
"""Runs of ncu: one that refuses a metric by name is followed by one that leaves it out."""

PERMISSION = "ERR_NVGPUCTRPERM"
ALLOWED = (
    "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); ask whoever owns the machine to set the option "
    "NVreg_RestrictProfilingToAdminUsers=0 of the nvidia kernel module and to reload it, or run as root; start a "
    "container with --cap-add=SYS_ADMIN (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)
PLATFORM = "cuda"
MISSING = "ncu is neither on the PATH nor in CUDA's folders; install Nsight Compute, which comes with the CUDA toolkit"


class NotCounted(Exception):
    """Counters cannot be read; the message gives the reason and what to do."""


@dataclass
class Counted:
    """The counters of the launches of one kernel: ``values`` by the names of :data:`COUNTED`."""

    kernel: str
    launches: int = 0
    values: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> tuple[str, float] | None:
        """The limit that it comes nearest to, and its share of that one's peak in percent."""
        shares = {n: self.values[n] for n in LIMITS if n in self.values}
        return max(shares.items(), key=lambda x: x[1]) if shares else None

    @property
    def stall(self) -> str | None:
        """What warps wait for most, in words; a warp that only waits for its turn loses nothing."""
        waits = {n: self.values[n] for n in STALLS if n in self.values and n != "not_selected"}
        return STALLS[max(waits, key=lambda n: waits[n])] if waits else None


def find(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where ncu lies: on the PATH, or in one of the folders that CUDA and Nsight Compute install to, the newest."""
    on_path = shutil.which("ncu", path=environment.get("PATH"))
    if on_path:
        return Path(on_path)
    homes = [environment[n] for n in ("CUDA_HOME", "CUDA_PATH") if environment.get(n)] + ["/usr/local/cuda"]
    folders = [f"{home}/bin" for home in homes] + ["/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*"]
    folders += [f"{home}/nsight-compute-*" for home in homes]
    for folder in folders:
        found = [p for p in sorted(glob.glob(f"{folder}/ncu"), reverse=True) if os.access(p, os.X_OK)]
        if found:
            return Path(found[0])
    return None


def collect(ncu: Path, command: Sequence[str], timeout: float, environment: Mapping[str, str]) -> list[Counted]:
    """Run a command under ncu, which counts between the command's own marks (cuProfilerStart and cuProfilerStop), and
    leaves the clocks as they are.

    Raises:
      NotCounted: with ncu's own reason, where it gave one.
    """
    metrics = list(dict.fromkeys(m for counter in COUNTED.values() for m in counter.metrics))
    for _ in range(ATTEMPTS):
        options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
        options += ["--clock-control", "none", "--cache-control", "all", "--metrics", ",".join(metrics)]
        try:
            done = subprocess.run(
                [str(ncu), *options, *command], capture_output=True, text=True, timeout=timeout, check=False,
                env={**environment, "LC_ALL": "C"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as e:
            raise NotCounted(f"{ncu} did not end: {e}") from e
        said = [line for line in (done.stdout + done.stderr).splitlines() if re.match(r"==(ERROR|WARNING)==", line)]
        if any(PERMISSION in line for line in said):
            raise NotCounted(ALLOWED)
        found = parse(done.stdout)
        if found:
            return found
        unknown = [m for m in metrics if any(m.partition(".")[0] in line for line in said)]
        metrics = [m for m in metrics if m not in unknown]
        if not unknown or not metrics:
            why = "; ".join(line.partition("==")[2].partition("== ")[2] for line in said) or _last(done)
            raise NotCounted(f"{ncu} counted nothing (exit status {done.returncode}): {why}")
    raise NotCounted(f"{ncu} refused metrics {ATTEMPTS} times")


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else "it said nothing"


def parse(text: str) -> list[Counted]:
    """Kernels in the order of their first launch, from ncu's output, in both of its forms: a row a launch with a column
    a metric, the second row naming units (``--page raw``); and a row a metric. What else is printed is passed over, as
    is a value that is no number (``n/a``)."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    header, *rows = list(csv.reader(lines[start:]))
    launches: dict[tuple[str, str], dict[str, float]] = {}
    for place, metric, unit, value in _cells(header, rows):
        counted = launches.setdefault(place, {})
        number = _number(value)
        if number is not None:
            counted[metric] = number * TO_BASE.get(unit.lower(), 1.0)
    return _by_kernel(launches)


def _cells(header: Sequence[str], rows: list[list[str]]) -> Iterator[tuple[tuple[str, str], str, str, str]]:
    """((id, kernel), metric, unit, value) of each; the metric is empty where a launch has no other."""
    places = {name: i for i, name in enumerate(header)}
    ident, kernel = places["ID"], places["Kernel Name"]
    if "Metric Name" in places:
        columns = [places[n] for n in ("Metric Name", "Metric Unit", "Metric Value")]
        for row in rows:
            if len(row) > max(columns):
                metric, unit, value = (row[i] for i in columns)
                yield (row[ident], row[kernel]), metric, unit, value
        return
    units = rows.pop(0) if rows and not rows[0][ident] else [""] * len(header)
    for row in rows:
        for i, metric in enumerate(header):
            if "__" in metric and len(row) == len(header):
                yield (row[ident], row[kernel]), metric, units[i], row[i]


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _by_kernel(launches: Mapping[tuple[str, str], Mapping[str, float]]) -> list[Counted]:
    """The launches of each kernel as one: sums, and means that count a launch by its time."""
    kernels: dict[str, list[Mapping[str, float]]] = {}
    for (_, name), metrics in launches.items():
        kernels.setdefault(name, []).append(metrics)
    found = []
    for name, each in kernels.items():
        weights = [metrics.get(TIME, 0.0) or 1.0 for metrics in each]
        counted = Counted(name, len(each))
        for what, counter in COUNTED.items():
            values = [next((m[n] for n in counter.metrics if n in m), None) for m in each]
            known = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
            if known:
                total = sum(w for _, w in known)
                counted.values[what] = (
                    sum(v for v, _ in known) if counter.summed else sum(v * w for v, w in known) / total
                )
        found.append(counted)
    return found
