"""Maintainers' tools, which run in a checkout: ``portakern report`` makes tables, plots and the stub from the stored
results and the source."""
