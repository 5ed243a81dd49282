"""A handler that says in a file which processes have loaded its model, and a source of many splits."""

from __future__ import annotations

import os
import sys

import cloudpickle

import penstock as ps

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a script: no worker imports this file


class Adds(ps.ModelHandler):
    """1000 more than the row; each load leaves a line in a file, with its process."""

    def __init__(self, log=None, **settings):
        super().__init__(**settings)
        self.log = log and str(log)

    def load_model(self):
        if self.log:
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()}\n")
        return 1000

    def run_inference(self, batch, model, inference_args=None):
        return [row + model for row in batch]


def loads(path):
    return path.read_text().split() if path.exists() else []


class Slices(ps.Source):
    """Rows in splits of 100, so that every worker gets some."""

    def __init__(self, rows):
        self.rows = rows

    def splits(self, goal):
        return [range(start, min(start + 100, self.rows)) for start in range(0, self.rows, 100)]

    def read(self, split):
        yield list(split)
