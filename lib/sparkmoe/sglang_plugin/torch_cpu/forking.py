"""Server processes by `fork`: one set of imports instead of three.

SGLang's scheduler and detokenizer are started with `spawn`: fresh interpreters that import everything once more. On a
GPU that is right, for CUDA does not survive a fork, and it hides behind loading 66 GB. Here the weights load in a
fifth of a second and the imports are the start: on two cores some 14 of 30 seconds, and as much again of memory that a
fork shares.

A fork copies the thread that calls it and the locks that others hold, so it is safe only from a process with a single
thread. That is looked up, not assumed: with a second thread SGLang's own `spawn` stays.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from typing import Any

logger = logging.getLogger(__name__)


def prefer_fork(result: None, server_args: Any) -> None:
    """After SGLang has chosen `spawn`: choose `fork` where this process has one thread.

    What has been imported is put out of the garbage collector's sight first; its marks would copy the shared pages.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        logger.info("server processes are spawned: this one has %d threads, too many to fork", threads)
        return
    gc.collect()
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)
