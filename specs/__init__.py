"""The ops: one file each, found by name. Nothing is imported until an op is asked for."""
