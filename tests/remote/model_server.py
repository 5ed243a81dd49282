"""A small OpenAI-style model server for tests, without a model: a completion repeats its prompt, in capitals.

    python model_server.py PORT [--never-ready] [--fail] [--log FILE] [--looks FILE] [--child FILE]

Prompts with a meaning of their own: `die ...` ends the process with SIGSEGV, `bad ...` is answered with status 400, `wait
FILE` is answered when the file is there. The key of requests is in the variable MODEL_SERVER_KEY, if there is one; the
first two tell it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = os.environ.get("MODEL_SERVER_KEY")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    never_ready = False
    answered: str | None = None
    looks: str | None = None

    def do_GET(self):
        if self.looks is not None:
            with open(self.looks, "a") as file:
                file.write("is it ready?\n")
        self.reply(503 if self.never_ready else 200, {"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if KEY is not None and self.headers["authorization"] != f"Bearer {KEY}":
            return self.reply(401, {"error": {"message": "no such key"}})
        text = asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]
        if text.startswith("die"):
            print("the server got a prompt that it cannot bear", KEY or "", flush=True)
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
        if text.startswith("bad"):
            return self.reply(400, {"error": {"message": f"this prompt is bad {KEY or ''}"}})
        while text.startswith("wait ") and not os.path.exists(text.removeprefix("wait ")):
            time.sleep(0.01)
        said = text.upper()
        if self.answered is not None:
            with open(self.answered, "a") as file:
                file.write(f"{os.getpid()} {text}\n")
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"text": said} if "prompt" in asked else {"message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(said.split())}
        return self.reply(200, {"model": asked.get("model"), "choices": [choice], "usage": usage})

    def reply(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--log")
    parser.add_argument("--looks")
    parser.add_argument("--child")
    options, _ = parser.parse_known_args()
    print("the server starts", flush=True)
    if options.fail:
        sys.exit("the weights are not there")
    if options.child:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(options.child).write_text(str(child.pid))
    Handler.never_ready, Handler.answered, Handler.looks = options.never_ready, options.log, options.looks
    server = Server(("127.0.0.1", options.port), Handler)
    threading.current_thread().name = "serves"
    server.serve_forever()


if __name__ == "__main__":
    main()
