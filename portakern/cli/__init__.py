"""The command line: ``portakern demo | ops | backends | show | check | compile | tune | report | doctor``, a module a command."""

from portakern.cli import check, compile, demo, listing, report, tune
from portakern.cli.common import app, main

__all__ = ["app", "check", "compile", "demo", "listing", "main", "report", "tune"]
