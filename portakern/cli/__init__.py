"""The command line: ``portakern demo | ops | backends | show | check | compile | report | doctor``, a module a command."""

from portakern.cli import check, compile, demo, listing, report
from portakern.cli.common import app, main

__all__ = ["app", "check", "compile", "demo", "listing", "main", "report"]
