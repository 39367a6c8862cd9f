"""One rank of a RankGroup: reads (case, keywords) from a pipe and answers (True, value) or
(False, traceback). Argument: the pipe's descriptor.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import rank_cases
import rank_gather_cases
import rank_train_cases
import torch
from accelerate.state import AcceleratorState
from torch import distributed

CASES = vars(rank_cases) | vars(rank_train_cases) | vars(rank_gather_cases)
TIMEOUT = timedelta(seconds=120)  # of collectives


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number in itertools.count():
        try:
            case, keywords = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['RANK_FOLDER']}/group{number}",
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        before = dict(os.environ)
        try:
            with pytest.MonkeyPatch.context() as patch:
                function = CASES[case]
                answer = (True, function(patch, **keywords))
        except BaseException:
            answer = (False, traceback.format_exc())
        os.environ.clear()
        os.environ.update(before)
        gc.collect()
        pipe.send_bytes(pickle.dumps(answer))
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    # Interpreter exit with torch 2.13's gloo sometimes ends in "terminate called without an active
    # exception"; nothing is left to do here.
    sys.stdout.flush()
    os._exit(0)
