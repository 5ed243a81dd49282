"""What makes a run the same as an earlier one, and what has changed if it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from penstock.io.files import without_secrets
from penstock.journal.identity.values import CLASS, FUNCTION, MODULE, OF_ONE_PYTHON

ROWS_IN_MEMORY = "what it creates"  # of Create: an input, though they stand in the program
SCHEME = 3  # how digests are made: those of different schemes cannot be compared

Kind: TypeAlias = Literal["pipeline", "inputs", "code", "handlers", "models"]
Digests: TypeAlias = Mapping[str, Mapping[str, str]]  # by step, and there by attribute


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a run does to its rows. It holds names and digests, no values: settings may be secret.

    Steps have names here that do not depend on where in a file they stand (see stable_names()).
    """

    shape: tuple[str, ...]  # lines of "subject: what", such as "stage 0, step 'Map(f)': Map to 'WriteToText(out)'"
    code: Digests  # of every step
    handlers: Digests  # of the steps that run models
    model_files: Mapping[str, tuple[str, ...]]  # the paths, by step
    python: str  # such as "3.11": digests of functions hold for this one
    scheme: int = SCHEME

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and text. Passwords and signatures in URLs of model files are left out."""
        return {
            "scheme": self.scheme,
            "python": self.python,
            "shape": list(self.shape),
            "code": {step: dict(found) for step, found in self.code.items()},
            "handlers": {step: dict(found) for step, found in self.handlers.items()},
            "model_files": {step: [without_secrets(path) for path in paths] for step, paths in self.model_files.items()},
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Identity:
        return cls(
            scheme=plain["scheme"],
            python=plain["python"],
            shape=tuple(plain["shape"]),
            code=plain["code"],
            handlers=plain["handlers"],
            model_files={step: tuple(paths) for step, paths in plain["model_files"].items()},
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was, in words."""

    kind: Kind
    text: str


def changes(before: Identity, after: Identity) -> list[Change]:
    """What differs between two runs; empty if the second can go on where the first was. Model files are not compared."""
    found = [Change("pipeline", text) for text in _shape_changes(before, after)]
    if before.scheme == after.scheme:
        same_python = before.python == after.python
        for step in after.code.keys() & before.code.keys():
            texts = _digest_changes(before.code[step], after.code[step], same_python)
            kind: Kind = "inputs" if ROWS_IN_MEMORY in after.code[step] else "code"
            found += [Change(kind, f"step {step!r}: {text}") for text in texts]
        for step in after.handlers.keys() & before.handlers.keys():
            texts = _digest_changes(before.handlers[step], after.handlers[step], same_python)
            found += [Change("handlers", f"handler of step {step!r}: {text}") for text in texts]
    order = {kind: at for at, kind in enumerate(get_args(Kind))}
    return sorted(found, key=lambda change: (order[change.kind], change.text))


def _shape_changes(before: Identity, after: Identity) -> Iterator[str]:
    gone, new = before.code.keys() - after.code.keys(), after.code.keys() - before.code.keys()
    yield from (f"step {step!r} is gone" for step in gone)
    yield from (f"step {step!r} is new" for step in new)
    old_lines, new_lines = _by_subject(before.shape), _by_subject(after.shape)
    places = {f"{kind} {step!r}" for kind in ("source", "sink") for step in before.code.keys() & after.code.keys()}
    for subject in sorted(old_lines.keys() & new_lines.keys()):
        if old_lines[subject] != new_lines[subject] and (subject in places or not (gone or new)):
            yield f"{subject}: {'; '.join(new_lines[subject])}, not {'; '.join(old_lines[subject])}"
    if not (gone or new) and old_lines.keys() != new_lines.keys():
        different = sorted(old_lines.keys() ^ new_lines.keys())
        yield f"the steps are put together in another way ({', '.join(different)})"


def _by_subject(lines: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines:
        subject, _, rest = line.partition(": ")
        found.setdefault(subject, []).append(rest)
    return found


def _digest_changes(before: Mapping[str, str], after: Mapping[str, str], same_python: bool) -> Iterator[str]:
    if before.get("class") != after.get("class"):
        yield "its class is another"
        return
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new or (not same_python and _depends_on_python(key, old, new)):
            continue
        what = _in_words(key, (new or old or "").partition(":")[0])
        if old is None:
            yield f"{what} is new" if ": " in key else f"{what} is set now"
        elif new is None:
            yield f"{what} is gone" if ": " in key else f"{what} is not set any more"
        else:
            yield f"{what} {'was changed' if new.startswith((FUNCTION, CLASS, MODULE)) else 'is another'}"


def _depends_on_python(key: str, old: str | None, new: str | None) -> bool:
    """What a function leads to is read from its bytecode."""
    if old is None or new is None:
        return ": " in key or (old or new or "").startswith(OF_ONE_PYTHON)
    return old.startswith(OF_ONE_PYTHON) and new.startswith(OF_ONE_PYTHON)


def _in_words(key: str, kind: str) -> str:
    user, _, used = key.partition(": ")
    if user == "fn":  # of Map and the like: people call it by another name
        user = "its function"
        if not used:
            return user
    named = f"the {kind} {used or user}" if kind in (FUNCTION, CLASS, MODULE) else used or user
    return f"{named}, which {user} uses," if used else named
