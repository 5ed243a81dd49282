"""Python imports this when a process starts that has its folder on PYTHONPATH: so workers have the places, too."""

import durable_steps

durable_steps.start()
