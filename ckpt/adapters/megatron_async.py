"""Requests of asynchronous saves for Megatron-Core that start no process, and a queue that asks whether they are committed."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from megatron.core.dist_checkpointing.strategies import async_utils

from ckpt.repository.repository import open_repository
from ckpt.saving import session_registry
from ckpt.saving.handle import SaveHandle
from ckpt.saving.lone_rank_warning import group_that_saves
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import CkptError


class AsyncCallsQueue(async_utils.AsyncCallsQueue):  # type: ignore[misc]
    """The AsyncCallsQueue of Megatron-Core, which also takes the requests of `ckpt.adapters.megatron.save`.

    A call to `maybe_finalize_async_calls(blocking=False)` returns at once while such a save runs. Megatron-Core's own queue
    waits there, because it only knows saves that run in a process.

    From the first save until `close`, the process is the writer of the repository, as the ranks of a group are.
    """

    call_idx: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sessions: dict[str, WriterSession] = {}
        weakref.finalize(self, _leave_all, self._sessions)

    def schedule_async_request(self, async_request: Any) -> int:
        """Add a request to the queue, and return its number."""
        handle = handle_of(async_request)
        if handle is None:
            return super().schedule_async_request(async_request)  # type: ignore[no-any-return]
        self._keep_session(async_request.finalize_fns[0].url)
        self.call_idx += 1
        self.async_calls.append(async_utils._ActiveAsyncRequest(self.call_idx, _CommitCaller(handle), async_request.freeze()))
        return self.call_idx

    def _keep_session(self, url: str) -> None:
        """Keep the writer session of a save for the next one, which would otherwise acquire the writer lease again."""
        if url not in self._sessions and (group := group_that_saves("auto")).size == 1:  # that of a group is kept anyway
            with suppress(CkptError):  # otherwise the next save raises it
                self._sessions[url] = session_registry.enter(open_repository(url), group)

    def close(self, *args: Any, **options: Any) -> None:
        """Wait for the saves, and release the repositories."""
        super().close(*args, **options)
        _leave_all(self._sessions)


def _leave_all(kept: dict[str, WriterSession]) -> None:
    while kept:
        session_registry.leave(kept.popitem()[1])


def request_of(handle: SaveHandle, url: str) -> Any:
    """Return a request whose first finalize function waits for the commit of a save to the repository at `url`."""
    return async_utils.AsyncRequest(None, (), [_Commit(handle, url)])


class _Commit:
    """A finalize function that waits for the commit, and raises the error of the save."""

    def __init__(self, handle: SaveHandle, url: str) -> None:
        self.handle, self.url = handle, url

    def __call__(self) -> None:
        self.handle.result()


def handle_of(request: Any) -> SaveHandle | None:
    """Return the save of a request that `request_of` made, None for another request."""
    first = request.finalize_fns[0] if request.finalize_fns else None
    return first.handle if isinstance(first, _Commit) else None


class _CommitCaller(async_utils.AsyncCaller):  # type: ignore[misc]
    """Reports whether a save has ended on all ranks; the other callers of Megatron-Core watch a process for that."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def schedule_async_call(self, async_req: object) -> None:
        """Do nothing: the save runs already."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether the save has ended on all ranks, or on this one with no_dist; wait for it with blocking."""
        if blocking:
            self._handle.wait()
        running = int(not self._handle.done())
        return (running == 0 if no_dist else bool(self.sync_all_async_calls(running))) or blocking

    def close(self, abort: bool = False) -> None:
        """Do nothing: there is no process to end."""

    def __del__(self) -> None:
        """Do nothing, where the class of Megatron-Core raises NotImplementedError."""
