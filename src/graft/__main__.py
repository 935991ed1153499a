"""`python -m graft` is `graft`."""

from graft.cli.app import main

main()
