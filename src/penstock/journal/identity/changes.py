"""What makes a run the same as an earlier one, and what has changed if it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from penstock.io.files import without_secrets

ROWS_IN_MEMORY = "what it creates"  # of Create: an input, though they stand in the program

Kind: TypeAlias = Literal["pipeline", "inputs", "code", "arguments", "handlers", "models"]
ByStep: TypeAlias = Mapping[str, Mapping[str, str]]  # digests, by step, and there by setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a run does to its rows. It holds names and digests, no values: settings may be secret.

    Steps have names here that do not depend on where in a file they stand (see stable_names()).
    """

    shape: tuple[str, ...]  # lines of "subject: what", such as "stage 0, step 'Map(f)': Map to 'WriteToText(out)'"
    settings: ByStep  # of every step
    handlers: ByStep  # of the steps that run models
    model_files: Mapping[str, tuple[str, ...]]  # the paths, by step
    files: Mapping[str, str]  # digests of the script and the modules that it imports, such as "script.py"
    arguments: str | None  # a digest of the script's; None: there is no script

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and text. Passwords and signatures in URLs of model files are left out."""
        return {
            "shape": list(self.shape),
            "settings": {step: dict(found) for step, found in self.settings.items()},
            "handlers": {step: dict(found) for step, found in self.handlers.items()},
            "model_files": {step: [without_secrets(path) for path in paths] for step, paths in self.model_files.items()},
            "files": dict(self.files),
            "arguments": self.arguments,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Identity:
        shape, files = tuple(plain["shape"]), {step: tuple(paths) for step, paths in plain["model_files"].items()}
        return cls(**{**plain, "shape": shape, "model_files": files})


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was, in words."""

    kind: Kind
    text: str


def changes(before: Identity, after: Identity) -> list[Change]:
    """What differs between two runs; empty if the second can resume the first. Model files are not compared."""
    found = [Change("pipeline", text) for text in _shape_changes(before, after)]
    found += [Change("code", text) for text in _digest_changes(before.files, after.files, "new", "gone", "was changed")]
    for step in after.settings.keys() & before.settings.keys():
        kind: Kind = "inputs" if ROWS_IN_MEMORY in after.settings[step] else "code"
        texts = _digest_changes(before.settings[step], after.settings[step])
        found += [Change(kind, f"step {step!r}: {text}") for text in texts]
    for step in after.handlers.keys() & before.handlers.keys():
        texts = _digest_changes(before.handlers[step], after.handlers[step])
        found += [Change("handlers", f"handler of step {step!r}: {text}") for text in texts]
    if None not in (before.arguments, after.arguments) and before.arguments != after.arguments:
        found.append(Change("arguments", "the script's arguments are others"))
    order = {kind: at for at, kind in enumerate(get_args(Kind))}
    return sorted(found, key=lambda change: (order[change.kind], change.text))


def _shape_changes(before: Identity, after: Identity) -> Iterator[str]:
    gone, new = before.settings.keys() - after.settings.keys(), after.settings.keys() - before.settings.keys()
    yield from (f"step {step!r} is gone" for step in gone)
    yield from (f"step {step!r} is new" for step in new)
    old_lines, new_lines = _by_subject(before.shape), _by_subject(after.shape)
    places = {f"{kind} {step!r}" for kind in ("source", "sink") for step in before.settings.keys() & after.settings.keys()}
    for subject in sorted(old_lines.keys() & new_lines.keys()):
        if old_lines[subject] != new_lines[subject] and (subject in places or not (gone or new)):
            yield f"{subject}: {'; '.join(new_lines[subject])}, not {'; '.join(old_lines[subject])}"
    if not (gone or new) and old_lines.keys() != new_lines.keys():
        different = sorted(old_lines.keys() ^ new_lines.keys())
        yield f"the steps are connected differently ({', '.join(different)})"


def _by_subject(lines: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines:
        subject, _, rest = line.partition(": ")
        found.setdefault(subject, []).append(rest)
    return found


def _digest_changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    new: str = "set now",
    gone: str = "not set any more",
    other: str = "has changed",
) -> Iterator[str]:
    if before.get("class") != after.get("class"):
        yield "its class has changed"
        return
    for key in sorted(before.keys() | after.keys()):
        what = "its function" if key == "fn" else key  # of Map and the like: people call it by another name
        if key not in before:
            yield f"{what} is {new}"
        elif key not in after:
            yield f"{what} is {gone}"
        elif before[key] != after[key]:
            yield f"{what} {other}"
