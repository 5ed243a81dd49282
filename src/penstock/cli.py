"""The command: penstock run, explain, status, verify, handlers, version.

Exit codes: 0 done; 1 the run failed; 2 the call, the pipeline or its input is wrong; 130, 141 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import faulthandler
import os
import runpy
import signal
import sqlite3
import sys
import tokenize
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from penstock.errors import EngineError, PenstockError, UsageError
from penstock.journal.errors import KEPT
from penstock.journal.status import status, verify
from penstock.observe.progress import StageProgress
from penstock.observe.result import RunResult
from penstock.observe.summary import models, summary, warnings
from penstock.options import CHANGES, RunOptions
from penstock.pipeline.graph import PCollection
from penstock.pipeline.pipeline import ENGINES, Engine, Graph, Pipeline, RunHandle, engine_named, engine_override
from penstock.rows import has_user_frames, original_traceback
from penstock.transport.reports import IN_A_WORKER
from penstock.version import __version__

NEAR = 0.85  # how like a flag of Penstock's an argument is that is taken for a slip: one letter in six or seven
SCRIPTED = {
    "run": "run the pipelines of a Python script",
    "explain": "show how the pipelines of a script would run, and why, without running them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    if argv is None and sys.stderr is not None:
        faulthandler.enable(all_threads=False)  # a crash in native code, where the run stays in this process, says where
    arguments = _parsed(list(sys.argv[1:] if argv is None else argv))
    if arguments.command == "version":
        _say(f"penstock {__version__}", sys.stdout)
        return 0
    try:
        if arguments.command == "handlers":
            from penstock.handlers.catalog import families, table

            _say(table(families()), sys.stdout)
            return 0
        if arguments.command == "status":
            _say(status(arguments.run_dir), sys.stdout)
            return 0
        if arguments.command == "verify":
            return _verify(arguments.run_dir)
        return _run_script(arguments)
    except UsageError as exc:
        _say(f"penstock: {_told(exc)}")
        return 2
    except PenstockError as exc:
        failed = "the run failed: " if arguments.command in SCRIPTED else ""
        _say(f"penstock: {failed}{_told(exc)}")
        return 1
    except KeyboardInterrupt as exc:
        _say("; ".join(["penstock: stopped", *_kept(exc)]))
        return 130


def _say(text: str, file: TextIO | None = None) -> None:
    """Print a line, to stderr if not told otherwise. Names of files need not be text, and readers may go away."""
    file = file or sys.stderr
    try:
        try:
            print(text, file=file, flush=True)
        except UnicodeEncodeError:
            print(text.encode(file.encoding, "backslashreplace").decode(file.encoding), file=file, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # what is left of it is written when Python ends
        sys.exit(128 + signal.SIGPIPE)


def _parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments. Flags are Penstock's on both sides of the script, as people write them, up to a `--`."""
    parser, scripted = _parser()
    at = argv.index("--") if "--" in argv else len(argv)
    own, rest = argv[:at], argv[at + 1 :]
    if not own or own[0] not in SCRIPTED:
        return parser.parse_args(argv)
    command = scripted[own[0]]
    if "-h" in own or "--help" in own:
        command.parse_args(["--help"])
    try:
        arguments, others = _flags().parse_known_args(own[1:])
    except argparse.ArgumentError as exc:
        command.error(str(exc))
    if others and others[0].startswith("-"):
        meant = _near_flag(others[0])
        command.error(f"{others[0]}: did you mean {meant}?" if meant else f"unrecognized arguments: {others[0]}")
    for other in others[1:]:
        if (meant := _near_flag(other)) is not None:
            command.error(f"{other}: did you mean {meant}? pass arguments of the script after --")
    others += rest
    if not others:
        command.error("the following arguments are required: script")
    arguments.command, arguments.script, arguments.arguments = own[0], others[0], others[1:]
    return arguments


def _near_flag(argument: str) -> str | None:
    """The flag of Penstock's that an argument for the script almost is: a slip that the script would get, unseen."""
    if not argument.startswith("-"):
        return None
    name = argument.lstrip("-").partition("=")[0]
    own = {flag.lstrip("-"): flag for flag in own_flags()}
    begun = [flag for flag in own if flag.startswith(name) and 2 * len(name) > len(flag)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(name, own, n=1, cutoff=NEAR)
    return own[near[0]] if near else None


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands that run a script."""
    parser = argparse.ArgumentParser(prog="penstock", description="ML inference over batch data as one transform.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    scripted = {}
    for name, text in SCRIPTED.items():
        scripted[name] = command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[_flags()]
        )
        command.add_argument("script", help="a Python file that builds pipelines")
        command.add_argument(
            "arguments",
            nargs=argparse.REMAINDER,
            help="passed to the script, as is everything after --; the options below may come before or after the script",
        )
    for name, text in (
        ("status", "show the progress of a run with a journal, even while it runs"),
        ("verify", "compare the output of a finished run with its manifest"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("run_dir", metavar="DIR", help="the run_dir of a run")
    told = "list the available handlers, what each needs, and what is installed"
    commands.add_parser("handlers", help=told, description=f"{told[0].upper()}{told[1:]}.")
    commands.add_parser("version", help="print the version")
    return parser, scripted


def own_flags() -> Mapping[str, argparse.Action]:
    """The flags of Penstock's, each with what it does."""
    return _flags()._option_string_actions


def _flags() -> argparse.ArgumentParser:
    """The flags of commands that run a script. None may be shortened: the script may have one that begins like it."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("--engine", choices=ENGINES, help="where to run (default: as the script says)")
    flags.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster, with --engine ray (default: RAY_ADDRESS)")
    flags.add_argument("--workers", type=_workers, metavar="N", help="worker processes; 0: run in this process; 2-8: 2 to 8")
    flags.add_argument("--threads-per-worker", type=int, metavar="N", help="splits that a worker runs at a time")
    flags.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="the same batches and random numbers every time",
    )
    flags.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="progress on stderr: live in a terminal, occasional lines elsewhere",
    )
    flags.add_argument("--run-dir", metavar="DIR", help="keep a journal there: an interrupted run can be resumed")
    flags.add_argument("--fresh", action="store_true", default=None, help="discard the run in DIR and start over")
    flags.add_argument(
        "--accept-change",
        action="append",
        choices=CHANGES,
        dest="accept_changes",
        help="resume although this has changed since the run was started (may be given several times)",
    )
    flags.add_argument(
        "--input-digests",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="digests of the inputs in the manifest (default: for up to 1 GiB of inputs)",
    )
    return flags


def _workers(text: str) -> int | tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        return (int(least), int(most)) if dash else int(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or two such as 2-8") from exc


def _run_script(arguments: argparse.Namespace) -> int:
    if not os.path.isfile(arguments.script):
        raise UsageError(f"{arguments.script}: no such file; expected a Python script that builds a pipeline")
    if not _is_text(arguments.script):
        raise UsageError(f"{arguments.script}: not a text file; expected a Python script that builds a pipeline")
    names = [field.name for field in dataclasses.fields(RunOptions)]
    flags = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    if "accept_changes" in flags:
        flags["accept_changes"] = tuple(flags["accept_changes"])
    settings = {} if arguments.address is None else {"address": arguments.address}
    if settings and arguments.engine != "ray":
        raise UsageError(f"--address {arguments.address}: it is for --engine ray")
    session = _ScriptEngine(explains=arguments.command == "explain")

    def override(engine: Engine, options: RunOptions) -> tuple[Engine, RunOptions]:
        session.engine = engine if arguments.engine is None else engine_named(arguments.engine, **settings)
        return session, options.replace(flags)

    token = engine_override.set(override)
    argv, path = sys.argv, list(sys.path)
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))
    try:
        return _execute(arguments.script, session)
    finally:
        engine_override.reset(token)
        sys.argv, sys.path[:] = argv, path


def _is_text(path: str) -> bool:
    """Whether a file may be Python: models and tables are not."""
    try:
        with tokenize.open(path) as file:
            return "\0" not in file.read()
    except (SyntaxError, UnicodeDecodeError):
        return False


def _execute(script: str, session: _ScriptEngine) -> int:
    path = os.path.abspath(script)
    try:
        names = runpy.run_path(path, run_name="__main__")  # __file__ is as Python itself has it
        sys.argv[:1] = [path]  # what is left to run belongs to it too, though __main__ is gone and the folder may be another
        pipelines = {id(value): value for value in names.values() if isinstance(value, Pipeline)}
        for pipeline in pipelines.values():
            if not pipeline.has_run:
                pipeline.run()
    except PenstockError:
        raise
    except Exception as exc:
        if session.count and session.explains:
            _say(f"penstock: the script stopped after that, without rows to work on: {exc!r}")
            return 0
        _print_script_error(exc, script)
        return 1
    if not session.count:
        raise UsageError(f"{script} builds no pipeline; expected a ps.Pipeline(), in a `with` block or at its top level")
    return 0


class _ScriptEngine:
    """Stands before a script's own engine, counts what comes by, and runs or explains it."""

    def __init__(self, *, explains: bool) -> None:
        self.engine: Engine | None = None
        self.explains = explains
        self.count = 0
        self.run_dirs: dict[Any, bool] = {}  # of its runs, and whether each is done

    def explain(self, graph: Graph, options: RunOptions) -> str:
        assert self.engine is not None
        return self.engine.explain(graph, options)

    def start(self, graph: Graph, options: RunOptions) -> RunHandle:
        assert self.engine is not None
        self.count += 1
        if self.explains:
            _say(self.explain(graph, options), sys.stdout)
            return _NotRun()
        if options.run_dir is not None and options.run_dir in self.run_dirs:
            done = "the previous one has finished, and is kept there; " if self.run_dirs[options.run_dir] else ""
            raise UsageError(
                f"--run-dir {options.run_dir}: the script runs several pipelines, and a folder holds one run; "
                f"{done}give each of them its own: ps.Pipeline(run_dir=...)"
            )
        self.run_dirs[options.run_dir] = False
        return _Reported(self.engine.start(graph, options), self.run_dirs, options)


class _Reported:
    """A run that says what it did when it is done."""

    def __init__(self, run: RunHandle, run_dirs: dict[Any, bool], options: RunOptions) -> None:
        self._run = run
        self._run_dirs = run_dirs
        self._options = options
        self.stop, self.progress = run.stop, run.progress

    @property
    def rows(self) -> Mapping[PCollection[Any], list[Any]]:
        return self._run.rows

    def wait(self) -> RunResult:
        result = self._run.wait()
        self._run_dirs[self._options.run_dir] = True
        for warning in warnings(result):
            _say(f"penstock: warning: {warning}")
        _say(f"penstock: {summary(result, self._options.run_dir)}")
        for told in models(result):
            _say(f"penstock: {told}")
        return result


class _NotRun:
    """The run of a pipeline that is explained: there are no rows."""

    rows: Mapping[PCollection[Any], list[Any]] = {}

    def wait(self) -> RunResult:
        return RunResult(run="", seconds=0.0, counts={})

    def stop(self) -> None: ...

    def progress(self) -> list[StageProgress]:
        return []


def _verify(run_dir: str) -> int:
    problems, files, unseen = verify(run_dir)
    for told in (*problems, *unseen):
        _say(f"penstock: {told}")
    if files or not unseen:
        _say(f"penstock: {files:,} file(s): {'not ' if problems else ''}as the manifest says")
    return 1 if problems else 0


def _told(exc: PenstockError) -> str:
    """An error for people: its message, for the user's own code the traceback of the original error, and whether the run
    can be resumed."""
    if isinstance(exc, UsageError):
        return "\n".join([str(exc), *_kept(exc)])
    notes = getattr(exc, "__notes__", [])
    is_disk = type(exc) is EngineError and isinstance(exc.__cause__, (OSError, sqlite3.Error))  # its message says it all
    is_own = exc.__cause__ is not None and not has_user_frames(exc.__cause__)  # nothing but its message, once more
    is_traced = exc.__cause__ is None or is_disk or is_own or any(note.startswith(IN_A_WORKER) for note in notes)
    return "\n".join([str(exc), *([] if is_traced else [original_traceback(exc)]), *notes])


def _kept(exc: BaseException) -> list[str]:
    """The notes which say that the run can be resumed."""
    return [note for note in getattr(exc, "__notes__", []) if note.startswith(KEPT)]


def _print_script_error(exc: Exception, script: str) -> None:
    """The traceback of an error in the script, without the frames of this command."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != os.path.abspath(script):
        frames = frames.tb_next
    traceback.print_exception(type(exc), exc, frames or exc.__traceback__)


if __name__ == "__main__":
    sys.exit(main())
