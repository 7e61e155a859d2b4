"""The command line: ``portakern demo | ops | backends | show | check | bench | compile | report | doctor``, a module a command."""

from portakern.cli import bench, check, compile, demo, listing, report
from portakern.cli.common import app, main

__all__ = ["app", "bench", "check", "compile", "demo", "listing", "main", "report"]
