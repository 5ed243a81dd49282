"""PipelineOptions, for pipelines written for Apache Beam: what Penstock has an option for is used, the rest is named."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import UsageError

LOCAL_RUNNERS = {"DirectRunner", "BundleBasedDirectRunner", "SwitchingDirectRunner", "FnApiRunner", "PrismRunner"}


def _workers(value: Any) -> dict[str, Any]:
    return {"workers": int(value) or None}  # 0 is Beam's word for one for each core


# Options of Beam's that mean something here, and what they are.
MAPPED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "direct_num_workers": _workers,
    "number_of_worker_harness_threads": lambda value: {"threads_per_worker": int(value)},
    "save_main_session": lambda value: {},  # what a script defines travels to workers in any case
    "direct_running_mode": lambda value: {},  # where there are workers, they are processes
}


class PipelineOptions:
    """Options of Apache Beam's, as flags (`["--direct_num_workers=4"]`) or by name, for `ps.Pipeline(options=...)`.

    `direct_num_workers` is `workers`, `number_of_worker_harness_threads` is `threads_per_worker`; `runner` may be one of
    Beam's local ones. Options that Penstock has no use for are named in one warning when the pipeline is made. Without
    flags those of the script are looked at, as in Beam.
    """

    def __init__(self, flags: Sequence[str] | None = None, **options: Any) -> None:
        if isinstance(flags, (str, bytes)):
            raise UsageError(f"PipelineOptions({flags!r}): expected a list of flags, such as ['--direct_num_workers=4']")
        found = _parsed(sys.argv[1:] if flags is None else list(flags))
        if flags is None:  # most flags of a script are its own
            found = {name: value for name, value in found.items() if name in MAPPED or name == "runner"}
        self.__dict__["given"] = found | options

    @classmethod
    def from_dictionary(cls, options: Mapping[str, Any]) -> PipelineOptions:
        """Options by name. The flags of the script are not looked at."""
        return cls([], **options)

    def view_as(self, kind: type) -> PipelineOptions:
        """These options: there is one view of them, whatever kind is asked for."""
        return self

    def get_all_options(self) -> dict[str, Any]:
        """The options that were given, by name, also those that Penstock ignores. A new dict each time."""
        return dict(self.given)

    def run_options(self) -> dict[str, Any]:
        """The options of a run; warns of those that are ignored."""
        found: dict[str, Any] = {}
        ignored = []
        for name, value in self.given.items():
            if name in MAPPED:
                found |= _mapped(name, value)
            elif name != "runner" or str(value).rpartition(".")[2] not in LOCAL_RUNNERS:
                ignored.append(f"{name}={value!r}")
        if ignored:
            warnings.warn(
                f"PipelineOptions: ignored, because Penstock has nothing like it: {', '.join(ignored)}", stacklevel=3
            )
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.given:
            raise AttributeError(f"PipelineOptions has no option {name!r}; it was given {', '.join(self.given) or 'none'}")
        return self.given[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.given[name] = value

    def __repr__(self) -> str:
        return f"PipelineOptions({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


def _mapped(name: str, value: Any) -> dict[str, Any]:
    try:
        return MAPPED[name](value)
    except (TypeError, ValueError):
        raise UsageError(f"PipelineOptions({name}={value!r}): expected a whole number") from None


def _parsed(flags: Sequence[str]) -> dict[str, Any]:
    """Flags as argparse would read them: `--name=value`, `--name value`, and `--name` alone, which is True."""
    found: dict[str, Any] = {}
    waiting: str | None = None
    for flag in flags:
        if flag.startswith("--"):
            name, is_given, value = flag[2:].partition("=")
            found[name] = value if is_given else True
            waiting = None if is_given else name
        elif waiting is not None:
            found[waiting] = flag
            waiting = None
    return found
