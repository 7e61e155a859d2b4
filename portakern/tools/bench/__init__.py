"""Benchmarks of ops: device time beside the measured roof and every peer. A result that is not checked has no time."""
