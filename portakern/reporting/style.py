"""How plots look: colours, faces, and figures in words."""

from __future__ import annotations

__all__ = ["COLOURS", "FAINT", "FILLS", "INK", "MARKERS", "SOFT", "STYLE", "rate", "short"]

INK, FAINT, SOFT = "#222222", "#8a8a8a", "#d9d9d9"
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # Okabe and Ito's, which colour-blind readers tell apart
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Beside colours: print may have none."""

FILLS = {"fits": "#b7dfc9", "spills": "#f6dd9c", "fails": "#ee9a8d"}
STYLE = {
    "svg.hashsalt": "portakern", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "path.simplify": False,
}  # fmt: skip


def rate(value: float) -> str:
    """Operations a second in words."""
    return (
        f"{value / 1e15:.3g} P"
        if value >= 1e15
        else f"{value / 1e12:.3g} T"
        if value >= 1e12
        else f"{value / 1e9:.3g} G"
    )


def short(dtype: str) -> str:
    """A dtype in few letters."""
    return dtype.replace("bfloat", "bf").replace("float", "f")
