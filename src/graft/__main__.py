"""`graft`, and `python -m graft`."""

from graft.cli.interrupts import run_interruptible


def program() -> None:
    from graft.cli.app import main as verbs  # typer and rich: a Ctrl-C may fall here

    verbs()


def main() -> None:
    run_interruptible(program)


if __name__ == "__main__":
    main()
