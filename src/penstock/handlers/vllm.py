"""Language models behind a vLLM server, with the arguments that Beam's handlers have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import UsageError
from penstock.handlers.catalog import own_family
from penstock.handlers.model_files import open_model_file
from penstock.handlers.server_process import HOST, PORT, ServerCommand
from penstock.handlers.servers import MODEL, ServerModelHandler

__all__ = ["OpenAIChatMessage", "VLLMChatModelHandler", "VLLMCompletionsModelHandler"]

SERVED = "model"  # what requests call the model, unless the user says
SPREADS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


@dataclass(frozen=True)
class OpenAIChatMessage:
    """One message of a chat: who says it ("user", "system" or "assistant"), and what."""

    role: str
    content: str


class VLLMServerModelHandler(ServerModelHandler):
    """What both have in common. The server is started as `python -m vllm.entrypoints.openai.api_server`."""

    def __init__(
        self,
        model_name: str,
        vllm_server_kwargs: Mapping[str, str | None] | None,
        protocol: str,
        *,
        use_dynamo: bool = False,
        python: str = sys.executable,
        max_in_flight: int = 256,
        start_timeout: float = 1200.0,
        **settings: Any,
    ) -> None:
        if use_dynamo:
            raise UsageError("use_dynamo=True: Dynamo is not supported; leave it out, or start it by ServerModelHandler")
        self._options = _checked_options(vllm_server_kwargs or {})
        served = self._options.get("served-model-name") or SERVED
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--host", HOST, "--port", PORT]
        command += ["--served-model-name", served] if "served-model-name" not in self._options else []
        for name, value in self._options.items():
            command += [f"--{name}"] if value is None else [f"--{name}", value]
        super().__init__(
            command,
            protocol=protocol,
            model=model_name,
            model_name=served,
            key_variable="VLLM_API_KEY",
            max_in_flight=max_in_flight,
            start_timeout=start_timeout,
            **settings,
        )

    def _server_command(self) -> ServerCommand:
        made = super()._server_command()
        need = own_family("vllm").needs[0]
        if made.command[0] == sys.executable and not need.is_met():
            raise UsageError(
                f"vllm {need.problem() or 'is not installed'} for {sys.executable}; run: pip install --upgrade vllm, best "
                'in an environment of its own, and give its interpreter: python="/path/of/that/venv/bin/python"'
            )
        return made

    def accelerator(self) -> str | None:
        """One server for each GPU, unless one takes several by itself."""
        return None if any(name in self._options for name in SPREADS) else "gpu"


class VLLMCompletionsModelHandler(VLLMServerModelHandler):
    """Rows are texts, or records where `prompt` or `columns` name what the text is made of; answers are what the model
    continues them with."""

    def __init__(self, model_name: str, vllm_server_kwargs: Mapping[str, str | None] | None = None, **settings: Any) -> None:
        """model_name: a name that vLLM knows, or a folder. vllm_server_kwargs: arguments of its server, without the dashes:
        {"max-model-len": "4096", "enforce-eager": None}. settings: those of ServerModelHandler, such as request_args; and
        python, the interpreter that has vLLM, if it is another one."""
        super().__init__(model_name, vllm_server_kwargs, "openai-completions", **settings)


class VLLMChatModelHandler(VLLMServerModelHandler):
    """Rows are lists of OpenAIChatMessage or of dicts, or texts, which are one message of a user; answers are what the model
    says next."""

    def __init__(
        self,
        model_name: str,
        chat_template_path: str | None = None,
        vllm_server_kwargs: Mapping[str, str | None] | None = None,
        **settings: Any,
    ) -> None:
        """chat_template_path: a file or a URL, for models that have no template of their own. The others as for
        VLLMCompletionsModelHandler."""
        super().__init__(model_name, vllm_server_kwargs, "openai-chat", **settings)
        self._chat_template_path = chat_template_path

    def _server_command(self) -> ServerCommand:
        made = super()._server_command()
        if self._chat_template_path is None:
            return made
        with open_model_file(self._chat_template_path) as file:
            return replace(made, command=(*made.command, "--chat-template", file.read().decode()))

    def _of_row(self, example: Any) -> Any:
        row = super()._of_row(example)
        if isinstance(row, (list, tuple)):
            return [asdict(each) if isinstance(each, OpenAIChatMessage) else each for each in row]
        return row


def _checked_options(options: Mapping[str, str | None]) -> dict[str, str | None]:
    """By the names that the command line has, or UsageError."""
    made: dict[str, str | None] = {}
    for name, value in options.items():
        if not isinstance(name, str) or not name.strip("-") or not (value is None or isinstance(value, (str, int, float))):
            what = "expected a name without dashes, and text; None for an option without a value"
            raise UsageError(f"vllm_server_kwargs={{{name!r}: {value!r}}}: {what}")
        option = name.strip("-").replace("_", "-")
        if option in ("host", "port", "model", "api-key"):
            raise UsageError(f"vllm_server_kwargs={{{name!r}: ...}}: --{option} is set by the handler; leave it out")
        made[option] = None if value is None else str(value)
    return made
