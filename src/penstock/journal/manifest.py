"""The manifest of a run: what went in, what ran, what came out. Made from the journal, for people and programs to keep."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from typing import Any

from penstock.errors import EngineError, UsageError
from penstock.io.digests import sha256_of
from penstock.io.files import without_secrets
from penstock.journal.journal import Journal
from penstock.journal.run_dir import MANIFEST
from penstock.options import RunOptions
from penstock.version import __version__

FORMAT = 1


def environment(options: RunOptions) -> dict[str, Any]:
    """What this process runs with, for the journal."""
    script = os.path.abspath(sys.argv[0]) if sys.argv and os.path.isfile(sys.argv[0]) else None
    installed = [each.metadata for each in importlib.metadata.distributions()]  # each is parsed when it is asked for
    packages = {each["Name"]: each["Version"] for each in installed if each["Name"]}
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "script": None if script is None else {"path": script, "sha256": sha256_of(script)},
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "seeds": {
            "deterministic": options.deterministic,
            "seed": options.split_seed,
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),
        },
    }


def make_manifest(journal: Journal) -> dict[str, Any]:
    """The run as it stands. `state` is finished, or how the last process ended; of one at work it is running."""
    sessions = journal.sessions()
    total, published, splits = journal.splits.total(), journal.splits.published(), journal.splits.counts()
    sinks: list[str] = journal.fact("sink_names") or []
    return {
        "format": FORMAT,
        "run": journal.fact("run"),
        "state": "finished" if journal.fact("finished") else (sessions[-1]["outcome"] if sessions else None) or "running",
        "created": _instant(journal.fact("created")),
        "sessions": [_session(session) for session in sessions],
        "accepted_changes": [{**each, "at": _instant(each["at"])} for each in journal.fact("accepted") or ()],
        "seconds": round(sum(session["seconds"] or 0 for session in sessions), 3),
        "splits": {"all": sum(splits.values()), "prepared": splits.get("prepared", 0), "done": splits.get("done", 0)},
        "counts": {
            label: {"rows_in": count.rows_in, "rows_out": count.rows_out, "rows_failed": count.rows_failed}
            for label, count in total.counts.items()
        },
        "failures": {label: count.kinds for label, count in total.counts.items() if count.kinds},
        "metrics": total.metrics.by_step(),
        "inputs": _files(journal, "input"),
        "models": _files(journal, "model"),
        "model_versions": _versions(journal),
        "outputs": [{"sink": name, "parts": published.get(place, [])} for place, name in enumerate(sinks)],
        "pipeline": (journal.fact("explained") or "").splitlines(),
        **(journal.fact("environment") or {}),
    }


def write_manifest(journal: Journal) -> None:
    """Put the manifest beside the journal: whole, or not at all."""
    path = os.path.join(journal.folder, MANIFEST)
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(f"{json.dumps(make_manifest(journal), indent=1)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
    except OSError as exc:
        raise EngineError(f"{path} cannot be written: {exc.strerror}; fix that and run the same command again") from exc


def read_manifest(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError as exc:
        raise UsageError(f"{folder}: has no {MANIFEST}; expected the run_dir of a run that has ended") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}; run the same command again to rewrite it") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UsageError(f"{path}: expected a manifest of format {FORMAT}, as this version writes it")
    if wrong := _wrong_with(manifest):
        raise UsageError(f"{path}: {wrong}; run the same command again to rewrite it")
    return manifest


def _wrong_with(manifest: dict[str, Any]) -> str | None:
    """What programs that read a manifest rely on, and it does not have."""
    if not isinstance(manifest.get("state"), str):
        return "does not say the state of the run"
    outputs = manifest.get("outputs")
    if not isinstance(outputs, list) or not all(isinstance(o, dict) and isinstance(o.get("parts"), list) for o in outputs):
        return "does not list the outputs of the run, with the parts of each"
    return None


def is_told_finished(folder: str) -> bool:
    """Whether the manifest in a folder says that its run is finished."""
    try:
        return bool(read_manifest(folder)["state"] == "finished")
    except UsageError:
        return False


def _files(journal: Journal, role: str) -> list[dict[str, Any]]:
    return [
        {"step": owner, "path": without_secrets(file.path), "bytes": file.size, "modified": file.modified, "sha256": digest}
        for owner, files in journal.files(role).items()
        for file, digest in files.values()
    ]


def _versions(journal: Journal) -> dict[str, Any]:
    """Of models that change during the run: what became of versions, and which has answered which splits."""
    answered: dict[tuple[str, str], dict[str, Any]] = {}
    for split, step, model_id, rows in journal.splits.answered():
        told = {"step": step, "model_id": without_secrets(model_id), "rows": 0, "splits": []}
        each = answered.setdefault((step, model_id), told)
        each["rows"] += rows
        each["splits"].append(list(split))
    events = [{**each, "at": _instant(each["at"])} for each in journal.fact("refreshes") or ()]
    return {"events": events, "answered": list(answered.values())}


def _session(session: dict[str, Any]) -> dict[str, Any]:
    error = (session["error"] or "").partition("\n")[0] or None  # the rest, its message, may show rows
    told = {"process": session["process"], "seconds": session["seconds"], "error": error}
    return {"started": _instant(session["started"]), **told, "outcome": session["outcome"] or "running"}


def _instant(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
