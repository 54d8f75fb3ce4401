"""`penstock config`: what options there are, what they are now and why, and whether a file is right."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Final

from penstock.cli.completers import completed, config_keys
from penstock.cli.terminal import CommandError, Output, Table, terminal_width
from penstock.config.config import Config, profiles_in
from penstock.config.files import FoundFile, find_file
from penstock.config.option_reference import (
    OptionEntry,
    config_page,
    config_schema,
    effective_options,
    every_option,
)
from penstock.kernel.errors import SpecError
from penstock.kernel.words import hint_at, nearest


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = "Show, check and explain the configuration."
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    show = what.add_parser("show", help="every option as it is now, and where it came from")
    show.description = "Print every option with its value and its source. Secrets are masked."
    _add_file(show)
    show.add_argument("--profile", metavar="NAME", help="of the file (PENSTOCK_PROFILE)")
    show.add_argument("--given", action="store_true", help="leave out what has its default")
    show.add_argument("--json", action="store_true", help="as one JSON document")

    check = what.add_parser("check", help="whether a file and the environment are right")
    check.description = (
        "Load the file with each of its profiles, and configure the stages. The exit status is 0 if all of "
        "it is right, else 1."
    )
    check.add_argument("file", metavar="FILE", nargs="?", help="the same as --config")
    _add_file(check)
    check.add_argument("--json", action="store_true", help="as one JSON document")

    reference = what.add_parser("reference", help="every key: type, unit, default and effect")
    key = reference.add_argument("key", metavar="KEY", nargs="?", default="", help="only keys that begin so")
    completed(key, config_keys)
    form = reference.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as the page of the documentation")
    form.add_argument("--schema", action="store_true", help="as a JSON schema, for editors")
    form.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Show, check or explain.

    Raises:
        ConfigError: If what is to be shown does not fit.
        CommandError: If there is no such key.
    """
    if options.what == "show":
        return _show(options, output)
    if options.what == "check":
        return _check(options, output)

    return _reference(options, output)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE",
        help="by default that of PENSTOCK_CONFIG, or the nearest penstock.toml upwards from here",
    )  # fmt: skip


def _show(options: argparse.Namespace, output: Output) -> int:
    found = effective_options(options.config, profile=options.profile)
    if options.given:
        found = [option for option in found if option.source != "default"]
    if options.json:
        output.say(json.dumps([asdict(option) for option in found], indent=2))
        return 0

    file = find_file(options.config, os.environ)
    output.note("no file" if file is None else f"{file.path} (named by {file.told_by})")
    output.table(Table(("key", "value", "from"), [(o.key, o.value, o.source) for o in found], n_left=3))
    return 0


def _check(options: argparse.Namespace, output: Output) -> int:
    file = find_file(options.file or options.config, os.environ)
    profiles: Sequence[str | None] = (None,) if file is None else (None, *profiles_in(file))
    problems = {profile: _problem(file, profile) for profile in profiles}
    if options.json:
        listed = [{"profile": profile, "problem": problem} for profile, problem in problems.items()]
        output.say(json.dumps({"file": None if file is None else file.path, "checked": listed}, indent=2))
    else:
        name = "the environment" if file is None else file.path
        for profile, problem in problems.items():
            where = name if profile is None else f"{name}, profile {profile}"
            if problem is None:
                output.success(f"{where}: right")
            else:
                output.say(f"{where}: {problem}")

    return 1 if any(problems.values()) else 0


def _problem(file: FoundFile | None, profile: str | None) -> str | None:
    """Return the error that opening a Checkpointer would raise; None if there is none."""
    # These import jax, which `show` and `reference` need not wait for.
    from penstock.checkpointer.pipelines import (
        configured_pipeline,
        fitting_pipeline,
        restore_pipeline,
        save_pipeline,
    )
    from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout

    environ = dict(os.environ)
    if profile is None:
        environ.pop("PENSTOCK_PROFILE", None)
    try:
        config = Config.load(None if file is None else file.path, profile=profile, environ=environ)
        saving = fitting_pipeline(save_pipeline(), OrbaxLayout(config.format))
        configured_pipeline(saving, config.save).check()
        configured_pipeline(restore_pipeline(), config.restore).check()
    except SpecError as error:
        return str(error)

    return None


def _reference(options: argparse.Namespace, output: Output) -> int:
    if options.markdown:
        output.say(config_page().rstrip("\n"))
        return 0
    if options.schema:
        output.say(json.dumps(config_schema(), indent=2))
        return 0

    options_there = every_option()
    entries = [entry for entry in options_there if entry.key.startswith(options.key)]
    if not entries:
        raise CommandError(f"no key begins with {options.key!r}; {_near_keys(options.key, options_there)}")
    if options.json:
        output.say(json.dumps([_document(entry) for entry in entries], indent=2))
        return 0

    if output.is_for_people:
        for entry in entries:
            _explain(entry, output)
    else:
        rows = [(each.key, each.type, each.unit, each.default, each.effect) for each in entries]
        output.table(Table(("key", "type", "unit", "default", "effect"), rows, n_left=5))

    return 0


def _explain(entry: OptionEntry, output: Output) -> None:
    """Print an option as a paragraph: its effect is too long for a column."""
    output.note(entry.key, "strong")
    unit = f" in {entry.unit}" if entry.unit else ""
    output.note(f"    {entry.type}{unit}, by default {entry.default}", "faint")
    width = min(terminal_width() or _PROSE_WIDTH, _PROSE_WIDTH)
    indent = "    "
    output.note(fill(entry.effect, width, initial_indent=indent, subsequent_indent=indent))


_PROSE_WIDTH: Final = 100  # lines that are longer are hard to read


def _near_keys(asked: str, entries: Sequence[OptionEntry]) -> str:
    """Name the key that is nearest, also to the last part of one; else the tables."""
    keys = [entry.key for entry in entries]
    tables = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    near = nearest(asked, keys if "." in asked else tables)
    if near is not None:
        return f"did you mean {near!r}?"

    end = nearest(asked, list(dict.fromkeys(key.rpartition(".")[2] for key in keys)))
    if end is None:
        return hint_at(asked, tables)

    meant = [key for key in keys if key.endswith(f".{end}")]
    more = f" or {len(meant) - 3} more" if len(meant) > 3 else ""
    return f"did you mean {', '.join(meant[:3])}{more}?"


def _document(entry: OptionEntry) -> dict[str, str]:
    return {
        "key": entry.key,
        "type": entry.type,
        "unit": entry.unit,
        "default": entry.default,
        "effect": entry.effect,
    }
