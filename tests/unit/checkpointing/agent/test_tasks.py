"""Threads with tasks, and the mailbox of an event loop."""

from __future__ import annotations

import threading

from checkpointing.agent.server import Mailbox
from checkpointing.agent.tasks import TaskThread, one_by_one
from checkpointing.host.threads import is_readable


def test_tasks_are_handled_in_order_and_none_is_lost_at_the_end() -> None:
    handled: list[int] = []
    thread = TaskThread[int]("test", one_by_one(handled.append))
    for number in range(50):
        thread.put(number)
    thread.start()
    for number in range(50, 100):
        thread.put(number)
    thread.close()
    assert handled == list(range(100))


def test_a_handler_gets_all_that_waits_and_is_called_a_last_time() -> None:
    rounds: list[list[int]] = []
    thread = TaskThread("test", rounds.append)
    for number in (1, 2, 3):
        thread.put(number)
    thread.run_pending()
    assert rounds == [[1, 2, 3]]
    thread.start()
    thread.close()
    assert rounds == [[1, 2, 3], []]


def test_the_loop_wakes_up_for_what_another_thread_posts() -> None:
    mailbox = Mailbox[str]()
    assert not is_readable(mailbox, 0)
    threading.Thread(target=mailbox.post, args=("done",)).start()
    assert is_readable(mailbox, 60)
    assert list(mailbox.take()) == ["done"]
    assert not is_readable(mailbox, 0)


def test_waking_up_needs_no_item_and_never_blocks() -> None:
    mailbox = Mailbox[str]()
    for _ in range(100_000):
        mailbox.wake()
    assert list(mailbox.take()) == []
