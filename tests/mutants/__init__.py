"""The shipped kernels with faults planted in them, to see whether ``pk.check`` finds each.

``python -m tests.mutants --help``.
"""
