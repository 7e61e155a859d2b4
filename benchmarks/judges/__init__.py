"""Rules by which kernels are judged, side by side: what each catches of planted faults and cheats, how often it accuses
a right kernel, and how long it takes.

``python -m benchmarks.judges --help``.
"""
