"""Attention on Hopper whose rows of keys are one split at any length."""

if __name__ != "portakern.backends.triton.unsplit":
    raise ImportError(
        f"this package is portakern.backends.triton.unsplit and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
