"""Lets ``python -m maru_cli`` be the command ``maru``."""

from maru_cli.app import main

main()
