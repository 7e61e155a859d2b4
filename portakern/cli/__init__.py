"""The command line, with one module for each command: ``portakern demo | ops | backends | show | check | judge |
invariance | bench | profile | compile | tune | report | doctor``."""

from portakern.cli import bench, check, compile, demo, invariance, judge, listing, profile, report, tune
from portakern.cli.common import app, main

__all__ = [
    "app",
    "bench",
    "check",
    "compile",
    "demo",
    "invariance",
    "judge",
    "listing",
    "main",
    "profile",
    "report",
    "tune",
]
