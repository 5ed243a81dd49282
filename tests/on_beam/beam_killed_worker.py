"""A pipeline in which a worker process of Beam's is killed, run as a program: a folder, and `processes` or `external`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import apache_beam as beam
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

import penstock.beam as of_penstock
from beam_runs import run


class Noted(of_penstock.ModelHandler):
    """In a host, whose processes it notes: the model's own, and the broker above it."""

    def __init__(self, folder):
        super().__init__(large_model=True)
        self.folder = folder

    def load_model(self):
        Path(self.folder, "hosts").write_text(f"{os.getpid()} {os.getppid()}")
        return 1

    def run_inference(self, batch, model, inference_args=None):
        return [each + model for each in batch]


def dies_once(row, folder):
    """At the first row that it sees, as if for lack of memory."""
    try:
        os.close(os.open(f"{folder}/died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return row
    os.kill(os.getpid(), signal.SIGKILL)
    return row


def program(base, p, folder):
    rows = p | beam.Create(range(400)) | beam.Reshuffle()
    return {"answers": rows | base.RunInference(Noted(folder)) | beam.Map(dies_once, folder)}


def main(folder, runner):
    if runner == "processes":
        run(program, of_penstock, folder, runner="processes")
        return
    address, _ = BeamFnExternalWorkerPoolServicer.start(use_process=True)
    external = ["--environment_type=EXTERNAL", f"--environment_config={address}"]
    run(program, of_penstock, folder, runner="portable", more=external)


if __name__ == "__main__":
    main(*sys.argv[1:])
