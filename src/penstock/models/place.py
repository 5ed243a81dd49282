"""Where a model lives: in each worker process, or in a host. Decided from the user's configuration and the machine alone."""

from __future__ import annotations

from dataclasses import dataclass

LOAD_TIMEOUT = 1800.0  # seconds
SHARED = "with the other models on that GPU"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process knows about the run that it works for."""

    folder: str = ""  # of the run's hosts; empty: there is no run, and models are in the process
    workers: int = 1  # processes of this machine that may hold a copy each
    slots: int = 1  # splits that each of these runs at a time
    spread: bool = False  # there are more of them, on other machines
    cores: int = 1  # of the machine
    threads: int = 1  # that may call a model at once, each with its share of the cores: those of a short job
    element_timeout: float | None = None
    load_timeout: float = LOAD_TIMEOUT
    gpus: tuple[str, ...] = ()  # by the names that CUDA_VISIBLE_DEVICES takes
    in_turn: bool = False  # of the threads of a process one runs at a time, while others wait for a host
    in_process: bool = False  # the run stays in the user's process
    seed: int | None = None  # of a deterministic run
    run_dir: str = ""  # of a run that can be resumed
    run: str = ""  # its id, the same when it is resumed
    default_budgets: int = 1  # steps with many models and no budget of their own: they have what is free together
    nodes_file: str = ""  # that says how many nodes of a cluster may have workers of this pool; empty: there is one machine

    @property
    def deterministic(self) -> bool:
        return self.seed is not None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user's configuration says about one model."""

    shared: bool = False  # large_model
    copies: int | None = None
    timeout: float | None = None
    isolated: bool = False
    accelerator: str | None = None  # "gpu": any of them; or one by its name
    gpus: tuple[str, ...] | None = None  # that it may use, if the user says so
    many: bool = False  # it is one of many, which have a budget
    neighbours: bool = False  # other steps have models that can share its process


@dataclass(frozen=True, kw_only=True)
class Place:
    hosted: bool
    why: str
    copies: int = 1
    devices: tuple[str, ...] = ()  # GPUs that the copies are dealt out to
    timeout: float | None = None  # seconds for one call of the model
    shared: bool = False  # with the models of other steps, and so is the memory there

    def describe(self, in_process: bool) -> str:
        if not self.hosted:
            return "one model copy in this process" if in_process else "one model copy in each worker process"
        copies = "one model copy" if self.copies == 1 else f"{self.copies} model copies"
        where = f" on {len(self.devices)} GPU{'s' if len(self.devices) > 1 else ''}" if self.devices else ""
        return f"{copies} for all processes{where}, in a host ({self.why})"


def choose_place(wishes: Wishes, around: Surroundings) -> Place:
    """The user's own word goes first."""
    timeout = wishes.timeout or around.element_timeout
    gpus = around.gpus if wishes.gpus is None else wishes.gpus
    devices = gpus if wishes.accelerator == "gpu" else ()
    processes = around.workers > 1 or around.spread or (not around.in_process and len(devices) > 1)
    is_shared = wishes.neighbours and len(devices) == 1 and timeout is None and not around.in_process
    reasons: list[tuple[bool, str, int]] = [
        (wishes.copies is not None, f"model_copies={wishes.copies}", wishes.copies or 1),
        (wishes.shared, "large_model", max(1, len(devices))),
        (is_shared, SHARED, 1),
        (bool(devices) and processes, "one for each GPU", len(devices)),
        (bool(wishes.accelerator) and wishes.accelerator != "gpu" and processes, f"one for {wishes.accelerator}", 1),
        (timeout is not None, f"timeout of {timeout} s: only a process can be killed", around.workers),
        (wishes.isolated, "use_subprocess", around.workers),
    ]
    for holds, why, copies in reasons:
        if holds:
            return Place(hosted=True, why=why, copies=copies, devices=devices, timeout=timeout, shared=why == SHARED)
    return Place(hosted=False, why="the default")
