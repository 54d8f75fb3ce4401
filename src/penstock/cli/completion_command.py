"""`penstock completion`: prints what makes a shell complete commands, options and what these name."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import sys
from importlib.util import find_spec
from typing import Final

from penstock.cli.terminal import CommandError, Output

_SHELLS: Final = ("bash", "zsh", "fish", "tcsh", "powershell")


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Print what makes SHELL complete penstock's commands and options, and in their places steps, leaves, "
        'items, metrics and keys of the configuration. In ~/.bashrc: eval "$(penstock completion bash)"; '
        'in ~/.zshrc, after compinit: eval "$(penstock completion zsh)"; in fish\'s config.fish: penstock '
        "completion fish | source"
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(options: argparse.Namespace, output: Output) -> int:
    """Print it.

    Raises:
        CommandError: If argcomplete is not installed.
    """
    if find_spec("argcomplete") is None:
        raise CommandError("completion needs argcomplete: pip install 'penstock[cli]'")

    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["penstock"], shell=options.shell) + "\n")  # a script: tabs stay
    return 0
