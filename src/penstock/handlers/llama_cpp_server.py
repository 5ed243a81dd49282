"""An OpenAI-style server for a GGUF file, by xllamacpp: a process of its own, with the options of llama.cpp's llama-server.

It is run as a script, without importing the package.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server reads it, too


def main() -> None:
    """Serve until a signal ends this process. Its guardian (server_guardian.py) sends it."""
    options = _options()
    import xllamacpp

    params = xllamacpp.CommonParams()
    _set(params, options)
    server = xllamacpp.Server(params)  # it is ready, or this raises
    while server is not None:  # its threads serve; this one holds it
        signal.pause()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--threads", type=int, default=-1)
    parser.add_argument("--gpu-layers", type=int, default=-1)
    parser.add_argument("--embeddings", action="store_true")
    return parser.parse_args()


def _set(params: Any, options: argparse.Namespace) -> None:
    params.model.path = options.model
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers = options.gpu_layers
    params.embedding = options.embeddings
    params.ui = False
    if key := os.environ.get(KEY_VARIABLE):
        params.api_keys = [key]


if __name__ == "__main__":
    main()
