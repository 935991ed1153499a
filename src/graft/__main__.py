"""`graft`, and `python -m graft`."""

from graft.cli.alone import process
from graft.cli.interrupts import run_interruptible


def program() -> None:
    process.alone = True
    from graft.cli.app import main as verbs  # typer and rich: a Ctrl-C may fall here

    verbs()


def main() -> None:
    run_interruptible(program)


if __name__ == "__main__":
    main()
