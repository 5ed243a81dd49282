"""Whether a run is the same as an earlier one: pipeline, code and handlers, in digests that every process agrees on."""

from penstock.journal.identity.changes import Change, Identity, changes
from penstock.journal.identity.run import describe_run, stable_names

__all__ = ["Change", "Identity", "changes", "describe_run", "stable_names"]
