"""The command ``portakern``, and ``python -m portakern``: the command line, or what to install for it."""

from __future__ import annotations

import sys

from portakern import install

LIBRARIES = ("typer", "rich")


def main() -> None:
    """Run the command line; where its libraries are missing, say which extra brings them: exit status 2."""
    from portakern import signals

    signals.listen()
    try:
        from portakern.cli import main as command_line
    except tuple(signals.ENDS.values()) as e:
        sys.exit(signals.status(e))
    except ModuleNotFoundError as e:
        if e.name not in LIBRARIES:
            raise
        print(
            f"portakern's command line needs {e.name}, which is not installed; {install.command('cli')} "
            "(portakern.op works without)",
            file=sys.stderr,
        )
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
