"""The backends: one package each, found through the ``portakern.backends`` entry-point group."""

if __name__ != "portakern.backends":
    raise ImportError(f"import this package as portakern.backends, not {__name__!r}: under another name its triton folder would hide the real triton")
