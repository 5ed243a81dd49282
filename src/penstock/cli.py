"""The command: penstock run, explain, status, verify, version.

Exit codes: 0 done; 1 the run failed; 2 the call, the pipeline or its input is wrong; 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from penstock.engines.local.journaled import KEPT
from penstock.engines.local.status import status, verify
from penstock.errors import PenstockError, UsageError
from penstock.observe.result import RunResult
from penstock.options import CHANGES, RunOptions
from penstock.pipeline.graph import PCollection
from penstock.pipeline.pipeline import Engine, Graph, Pipeline, engine_override
from penstock.rows import original_traceback
from penstock.transport.reports import IN_A_WORKER
from penstock.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "version":
        print(f"penstock {__version__}")
        return 0
    try:
        if arguments.command == "status":
            print(status(arguments.run_dir))
            return 0
        if arguments.command == "verify":
            return _verify(arguments.run_dir)
        return _run_script(arguments)
    except UsageError as exc:
        print(f"penstock: {_told(exc)}", file=sys.stderr)
        return 2
    except PenstockError as exc:
        print(f"penstock: the run failed: {_told(exc)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("penstock: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="ML inference over batch data as one transform.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in (
        ("run", "run the pipelines of a Python script"),
        ("explain", "show how the pipelines of a script would run, and why, without running them"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("script", help="a Python file that builds pipelines")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
        command.add_argument("--workers", type=int, metavar="N", help="worker processes; 0: stay in one process")
        command.add_argument("--threads-per-worker", type=int, metavar="N", help="splits that a worker runs at a time")
        command.add_argument(
            "--deterministic", action="store_true", default=None, help="batches inside a split only, in one fixed way"
        )
        command.add_argument(
            "--progress", action=argparse.BooleanOptionalAction, default=None, help="live lines (default: in a terminal)"
        )
        command.add_argument("--run-dir", metavar="DIR", help="keep a journal there: run it again, and it goes on")
        command.add_argument(
            "--fresh", action="store_true", default=None, help="forget the run that is in DIR, and start over"
        )
        command.add_argument(
            "--accept-change",
            action="append",
            choices=CHANGES,
            dest="accept_changes",
            help="go on although this has changed since the run was begun (may be given several times)",
        )
        command.add_argument(
            "--input-digests",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="digests of the inputs in the manifest (default: up to 1 GiB of them)",
        )
    for name, text in (
        ("status", "show how a run with a journal stands, also while it goes on"),
        ("verify", "compare the output of a finished run with its manifest"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("run_dir", metavar="DIR", help="the run_dir of a run")
    commands.add_parser("version", help="print the version")
    return parser


def _run_script(arguments: argparse.Namespace) -> int:
    if not os.path.isfile(arguments.script):
        raise UsageError(f"{arguments.script}: no such file; expected a Python script that builds a pipeline")
    names = (
        "workers",
        "threads_per_worker",
        "deterministic",
        "progress",
        "run_dir",
        "fresh",
        "accept_changes",
        "input_digests",
    )
    flags = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if "accept_changes" in flags:
        flags["accept_changes"] = tuple(flags["accept_changes"])
    session = _Explaining() if arguments.command == "explain" else _Running()

    def override(engine: Engine, options: RunOptions) -> tuple[Engine, RunOptions]:
        session.engine = engine
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


def _execute(script: str, session: _Session) -> int:
    try:
        names = runpy.run_path(script, run_name="__main__")
        pipelines = {id(value): value for value in names.values() if isinstance(value, Pipeline)}
        for pipeline in pipelines.values():
            if not pipeline.has_run:
                pipeline.run()
    except PenstockError:
        raise
    except Exception as exc:
        if session.count and isinstance(session, _Explaining):
            print(f"penstock: the script stopped after that, without rows to work on: {exc!r}", file=sys.stderr)
            return 0
        _print_script_error(exc, script)
        return 1
    if not session.count:
        raise UsageError(f"{script} builds no pipeline; expected a ps.Pipeline(), in a `with` block or at its top level")
    return 0


class _Session:
    """Stands before a script's own engine, and counts what came by."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.count = 0
        self.run_dirs: list[Any] = []

    def explain(self, graph: Graph, options: RunOptions) -> str:
        assert self.engine is not None
        return self.engine.explain(graph, options)

    def run(self, graph: Graph, options: RunOptions) -> tuple[RunResult, dict[PCollection[Any], list[Any]]]:
        raise NotImplementedError


class _Running(_Session):
    def run(self, graph: Graph, options: RunOptions) -> tuple[RunResult, dict[PCollection[Any], list[Any]]]:
        assert self.engine is not None
        self.count += 1
        if options.run_dir is not None and options.run_dir in self.run_dirs:
            raise UsageError(
                f"--run-dir {options.run_dir}: the script runs several pipelines, and a folder holds one run; "
                "give each of them its own: ps.Pipeline(run_dir=...)"
            )
        self.run_dirs.append(options.run_dir)
        result, rows = self.engine.run(graph, options)
        read = sum(count.rows_out for count in result.counts.values() if not count.rows_in)
        where = f" -> {', '.join(result.outputs)}" if result.outputs else ""
        if result.was_finished:
            told = f"the run in {options.run_dir} is finished, nothing is left to do (--fresh starts over): {read:,} rows"
        elif result.splits_before:
            told = f"{read:,} rows, of which what was left in {result.seconds:.1f} s"
        else:
            told = f"{read:,} rows in {result.seconds:.1f} s"
        print(f"penstock: {told}{where}", file=sys.stderr)
        return result, rows


class _Explaining(_Session):
    def run(self, graph: Graph, options: RunOptions) -> tuple[RunResult, dict[PCollection[Any], list[Any]]]:
        self.count += 1
        print(self.explain(graph, options))
        return RunResult(run="", seconds=0.0, counts={}), {pcoll: [] for pcoll in graph.collect}


def _verify(run_dir: str) -> int:
    problems, files, unseen = verify(run_dir)
    for told in (*problems, *unseen):
        print(f"penstock: {told}", file=sys.stderr)
    if files or not unseen:
        print(f"penstock: {files:,} file(s): {'not ' if problems else ''}as the manifest says", file=sys.stderr)
    return 1 if problems else 0


def _told(exc: PenstockError) -> str:
    """An error for people: its message, for the user's own code the traceback of the original error, and whether the run
    can go on."""
    notes = getattr(exc, "__notes__", [])
    if isinstance(exc, UsageError):
        return "\n".join([str(exc), *(note for note in notes if note.startswith(KEPT))])
    is_traced = exc.__cause__ is None or any(note.startswith(IN_A_WORKER) for note in notes)
    return "\n".join([str(exc), *([] if is_traced else [original_traceback(exc)]), *notes])


def _print_script_error(exc: Exception, script: str) -> None:
    """The traceback of an error in the script, without the frames of this command."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    traceback.print_exception(type(exc), exc, frames or exc.__traceback__)


if __name__ == "__main__":
    sys.exit(main())
