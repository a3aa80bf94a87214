"""The executors that the same tests run through, by name. A factory is factory(program, **limits) -> Executor.

Limits, all of which every executor takes: num_pages, page_size, num_threads, max_tokens, max_requests, max_logit_rows.
"""

from __future__ import annotations

from importlib.util import find_spec

NUM_PAGES = 64
LIMITS = dict(num_pages=NUM_PAGES, page_size=16, max_tokens=256, max_requests=8, max_logit_rows=256)  # for tiny models


def reference(program, **limits):
    from tokenmill.backends.reference import ReferenceExecutor

    return ReferenceExecutor(program, **limits)


def cpu(program, **limits):
    from tokenmill.backends.cpu.executor import CpuExecutor

    return CpuExecutor(program, **{"num_threads": 2, **limits})


FACTORIES = {"reference": reference}
if find_spec("tokenmill.backends.cpu.executor") is not None:
    FACTORIES["cpu"] = cpu
