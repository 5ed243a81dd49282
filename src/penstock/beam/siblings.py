"""How many worker processes share a machine, as far as the options of a pipeline say."""

from __future__ import annotations

import os
from typing import Any

from apache_beam.options.pipeline_options import DirectOptions, PortableOptions


def workers_of(options: Any) -> int:
    """Those that see one /tmp, so that they find each other; 1 where nobody knows."""
    direct = options.view_as(DirectOptions)
    if direct.direct_running_mode == "multi_processing":
        return int(direct.direct_num_workers) or os.cpu_count() or 1  # 0: as many as there are cores
    portable = options.view_as(PortableOptions)
    if portable.environment_type == "PROCESS":
        return max(1, int(portable.sdk_worker_parallelism or 1))
    return 1
