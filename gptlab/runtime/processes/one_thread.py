"""One thread, for work that nobody need wait for. Where the system refuses it (the limit of processes of a user or a
container), that work is done at once instead: a run must not end for want of a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneThread(ThreadPoolExecutor):
    def __init__(self, name: str = "") -> None:
        super().__init__(max_workers=1, thread_name_prefix=name)
        self._is_refused = False

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do `work` on the thread, after what was submitted before."""
        if not self._is_refused:
            try:
                return super().submit(work, *args, **kwargs)
            except RuntimeError as error:
                if "new thread" not in str(error):  # such as after `shutdown`
                    raise
                self._is_refused = True  # a thread that began later would do the work in its queue a second time
        return run_now(work, *args, **kwargs)


def run_now(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """The result of `work`, done before this returns."""
    future: Future[T] = Future()
    try:
        future.set_result(work(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
    return future
