"""GGUF models behind llama.cpp's server: the one of xllamacpp, or the program llama-server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import UsageError
from penstock.handlers import llama_cpp_server
from penstock.handlers.catalog import check_versions
from penstock.handlers.server_process import HOST, PORT, ServerCommand
from penstock.handlers.servers import MODEL, ServerModelHandler
from penstock.inference.handler_checks import checked_path
from penstock.remote.rules import check_at_least_one

__all__ = ["LlamaCppModelHandler"]


class LlamaCppModelHandler(ServerModelHandler):
    """A language model in a GGUF file, on the CPU or on a GPU, by llama.cpp. Rows and answers are those of
    OpenAICompatibleModelHandler."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        task: str = "chat",
        parallel: int = 8,
        context: int = 2048,
        threads: int | None = None,
        gpu_layers: int | None = None,
        server: str | os.PathLike[str] | None = None,
        server_args: Sequence[str] = (),
        max_in_flight: int | None = None,
        **settings: Any,
    ) -> None:
        """model_path: the file, on this machine. task: "chat", "completions" or "embeddings".
        parallel: rows that the model works on at a time. context: tokens of a row, prompt and answer together.
        threads: None: this server's share of the cores. gpu_layers: of the model, that go to the GPU; None: as many as fit.
        server: the program llama-server, which is used instead of the package xllamacpp. server_args: more of its arguments.
        max_in_flight: requests at once; None: twice `parallel`, so that a row is at hand when one is answered.
        settings: those of ServerModelHandler, such as prompt, columns, request_args, model_copies and start_timeout."""
        for name, value in [("parallel", parallel), ("context", context)]:
            check_at_least_one(name, value)
        if server is None and server_args:
            raise UsageError("server_args= are for the program llama-server: give its path as server=")
        self._threads = threads
        program = [sys.executable, "-P", llama_cpp_server.__file__] if server is None else [os.fspath(server), *server_args]
        command = [*program, "--model", MODEL, "--host", HOST, "--port", PORT]
        command += ["--parallel", str(parallel), "--ctx-size", str(parallel * context)]
        command += [] if gpu_layers is None else ["--gpu-layers", str(gpu_layers)]
        command += ["--embeddings"] if task == "embeddings" else []
        super().__init__(
            command,
            protocol=f"openai-{task}",
            model=checked_path(model_path),
            max_in_flight=2 * parallel if max_in_flight is None else max_in_flight,
            key_variable=llama_cpp_server.KEY_VARIABLE,
            **settings,
        )
        self._needs_package = server is None

    def _server_command(self) -> ServerCommand:
        """Called where the server is started: the cores are those of that process."""
        if self._needs_package:
            check_versions("llama_cpp")
        made = super()._server_command()
        threads = self._threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1
        return replace(made, command=(*made.command, "--threads", str(threads)))
