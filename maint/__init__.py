"""What only maintainers run, in a checkout: ``portakern report`` makes tables, plots and the stub from the results that
are kept and from the source."""
