"""``portakern ops | backends | show | doctor``: what is declared, installed and available."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from portakern import inventory
from portakern.cli.common import JsonFile, app, out, print_json, show_table
from portakern.core import registry


@app.command()
def ops(json_file: JsonFile = None) -> None:
    """List the ops and the backends that implement each."""
    rows = inventory.ops()
    if print_json("ops", json_file, rows):
        return
    every = list(registry.backends())
    show_table(
        f"Ops; the backends are {', '.join(every)}",
        ["op", "arguments", "outputs", "backends"],
        [
            [r["op"], r["arguments"], r["outputs"], "all" if r["backends"] == every else ", ".join(r["backends"])]
            for r in rows
        ],
    )


@app.command()
def backends(json_file: JsonFile = None) -> None:
    """List the backends and the peers: where each runs, and what is missing here."""
    rows, peers = inventory.backends(), inventory.peers()
    if print_json("backends", json_file, rows + peers):
        return
    columns = ["backend", "arrays", "compiles for", "interpreter", "status"]
    for title, listed in {"Backends": rows, "Peers: used only when named": peers}.items():
        show_table(
            title,
            columns,
            [
                [
                    r["backend"],
                    r["framework"],
                    ", ".join(r["compiles"]),
                    "on cpu" if r["interprets"] else "-",
                    r["status"],
                ]
                for r in listed
            ],
        )


@app.command()
def show(op: Annotated[str, typer.Argument(help="Name of the op.")], json_file: JsonFile = None) -> None:
    """Show an op's declaration: arguments, options, outputs, parts, tilings and implementations."""
    info = inventory.show(op)
    if print_json("show", json_file, info):
        return
    out.print(info["op"], style="bold")
    out.print(info["doc"] + "\n", markup=False, highlight=False, soft_wrap=True)
    show_table(
        "Arrays",
        ["name", "shape", "dtypes", "optional"],
        [[a["name"], a["shape"], ", ".join(a["dtypes"]), "yes" if a["optional"] else ""] for a in info["arrays"]],
    )
    show_table(
        "Options",
        ["name", "default", "expected"],
        [[o["name"], repr(o["default"]), o["expected"]] for o in info["options"]],
    )
    show_table(
        "Outputs",
        ["name", "shape", "dtype", "returned", "memory"],
        [[o["name"], o["shape"], o["dtype"], o["returned"], o["memory"]] for o in info["outputs"]],
    )
    if info["dimensions"]:
        show_table("Dimensions", ["name", "meaning"], [[f"*{n}", what] for n, what in info["dimensions"].items()])
    for p in info["parts"]:
        words = (f"{p['cut']} cut", p["outputs"], p["options"], p["notes"])
        text = f"Parts along {p['dimension']}: {'; '.join(filter(None, words))}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    for rule in info["value_rules"]:
        out.print(f"Values: {rule}", markup=False, highlight=False, soft_wrap=True)
    show_table("Tiles", ["name", "powers of two"], [[n, f"{lo} to {hi}"] for n, (lo, hi) in info["tiling"].items()])
    taken: dict[tuple[str, ...], list[str]] = {}
    for r in info["tilings"]:
        taken.setdefault((r["backend"], r["name"], r["values"], r["meaning"]), []).append(r["variant"])
    show_table(
        "Tilings",
        ["backend", "name", "values", "meaning", "variants"],
        [[*row, ", ".join(variants)] for row, variants in taken.items()],
    )
    for title, rows in {"Implementations": info["implementations"], "Peers": info["peers"]}.items():
        show_table(title, ["backend", "module", "lines"], [[i["backend"], i["module"], str(i["lines"])] for i in rows])
    for i in info["implementations"]:
        if "requires" in i:
            text = f"{i['backend']}, variant {i['variant']}, cannot be imported here: it requires {i['requires']}"
            out.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor(json_file: JsonFile = None) -> None:
    """Show versions, devices, what each backend can do on this machine, what to install, and which protections the
    judge has here."""
    info = {**inventory.doctor(), "judge": _protections()}
    if print_json("doctor", json_file, info):
        return
    show_table("Installed", ["package", "version"], [[k, v or "-"] for k, v in info["environment"].items()])
    show_table("Devices", ["framework", "device"], [[d["framework"], d["device"]] for d in info["devices"]])
    show_table(
        "Backends",
        ["backend", "status", "next step"],
        [[b["backend"], b["status"], b["next_step"]] for b in info["backends"]],
    )
    show_table(
        "The judge's protections (portakern judge)",
        ["protection", "here", "what"],
        [[p["protection"], "yes" if p["granted"] else "no", p["what"]] for p in info["judge"]],
    )


def _protections() -> list[dict[str, Any]]:
    """Each protection of a judged kernel's process, and whether this system grants it; none but on Linux."""
    if sys.platform != "linux":
        return []
    from portakern.tools.judge.process import protections_here
    from portakern.tools.judge.sandbox import PROTECTIONS

    granted = protections_here()
    return [{"protection": name, "granted": name in granted, "what": what} for name, what in PROTECTIONS.items()]
