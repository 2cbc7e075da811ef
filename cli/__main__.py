"""The console script; `python -m cli` in the source tree, `python -m minfer_cuda.cli` installed."""

from __future__ import annotations

from .process import run


def command() -> None:
    """Parse and run what the command line says."""
    from .main import app

    app(prog_name="minfer")


def main() -> None:
    """Run as a process."""
    run(command)


if __name__ == "__main__":
    main()
