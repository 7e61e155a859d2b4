"""What ``maint/names.py`` demands of names, and that it sees what breaks a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from maint import names

ROOT = Path(__file__).parent.parent


def test_names_are_a_readers_and_no_two_classes_share_one():
    assert names.faults(ROOT) == []


PLANTED = {
    "a function": ("specs/a.py", "def told():\n    pass\n", "specs/a.py:1: 'told'; use message"),
    "a private function in a class": (
        "maint/a.py", "class A:\n    def _place(self):\n        pass\n", "maint/a.py:2: '_place'; use index"),
    "a parameter": ("specs/a.py", "def f(x, *, got):\n    pass\n", "specs/a.py:1: parameter 'got'; use actual"),
    "a field": ("portakern/a.py", "class A:\n    walls: int\n", "portakern/a.py:2: field 'walls'; use protections"),
    "a class": ("portakern/a.py", "class Room:\n    pass\n\n\nclass house:\n    pass\n", "portakern/a.py:5: 'house'"),
    "a module": ("backends/_turns.py", "", "backends/_turns.py:1: module '_turns'; use iterations"),
    "a module that says nothing": ("backends/utils.py", "", "backends/utils.py:1: module 'utils'; say what"),
    "a function that says nothing": ("specs/a.py", "def of(x):\n    pass\n", "specs/a.py:1: 'of'; say what"),
    "a docstring": (
        "specs/a.py", '"""An adapter of ours."""\n', "specs/a.py:1: docstring says 'ours'; write portakern's"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_word_is_seen(what, tmp_path):
    path, text, report = PLANTED[what]
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (found,) = names.faults(tmp_path)
    assert found.startswith(report)


def test_a_name_of_two_classes_is_seen(tmp_path):
    """Underscores before it make it no other name; a config is one of each backend."""
    for folder, text in (("specs", "class Plan:\n    pass\n"), ("backends/a", "class _Plan:\n    pass\n")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(text + "\n\nclass RowsConfig:\n    pass\n")
    (found,) = names.faults(tmp_path)
    assert found.startswith("backends/a/a.py:1: class 'Plan' is also in specs/a.py:1")


def test_what_may_stay(tmp_path):
    """A constructor, an option of a command, and a word within a longer one."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.py").write_text(
        "class A:\n    @classmethod\n    def of(cls, call):\n        pass\n\n\n"
        "@app.command()\ndef judge(whole=False):\n    pass\n\n\ndef place_arrays(turned):\n    pass\n"
    )
    assert names.faults(tmp_path) == []


def test_a_hint_is_not_banned_itself():
    hints = {word.strip(",:") for hint in names.BANNED.values() for word in hint.split()}
    assert not hints & {*names.BANNED}
