"""The process that keeps torch loaded and runs torchrun's `elastic_launch`, once per attempt.

    python -m runner.launcher.launcher CONTROL_FD LOG_FILE TEMPORARY_FOLDER PARENT_PID

It loads torch, and forks a server that loads transformers and trl as well. For each `launch` request it runs
`elastic_launch` with `max_restarts=0` and a fresh rendezvous, and reports how that ended. Only the supervisor retries:
torchrun's own in-place restart shares one store between attempts, and stale keys in it hang the next one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from checkpointing.agent import protocol
from checkpointing.agent.protocol import Message
from checkpointing.host.limits import explained
from checkpointing.host.process_title import name_this_process
from runner.launcher.rendezvous import BACKEND, EXIT_LIMITED
from runner.system import processes

PRELOAD = ["runner.training.preload"]
# Seconds that torchrun gives the other ranks after one has ended. The supervisor kills the ranks of a failed attempt;
# after a stop request, ranks close their trackers in this time.
_SHUTDOWN_TIMEOUT_S = 30
# Seconds between torchrun's polls of its ranks; a death wakes it at once.
_MONITOR_INTERVAL_S = 5.0


class Signal:
    """An event that one process sets and others wait for, any of which may be killed at any time.

    torchrun uses `multiprocessing.Event`, whose `set` waits for all waiting processes: without end for a killed one.
    """

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def __getstate__(self) -> Any:
        return self._reader

    def __setstate__(self, reader: Any) -> None:
        self._reader = reader

    def set(self) -> None:
        """Wake all that wait."""
        self._writer.close()

    def wait(self) -> None:
        """Wait until the event is set, or the process that would set it has died."""
        with contextlib.suppress(EOFError, OSError):
            self._reader.recv_bytes()


def rank_main(spec: dict[str, Any]) -> None:
    """Run the bundled job, or the user's script as `__main__`, in a rank; `spec` is that of the launch request."""
    from runner.training.rank import run_rank

    run_rank(spec)


def prepare_main(spec: dict[str, str]) -> None:
    """Prepare the data of the bundled job, in a fork of the fork server; `spec` is the `prepare` of the request."""
    from runner.training.rank import run_preparation

    run_preparation(spec)


def main() -> int:
    """Load torch, then run one attempt per request until the supervisor closes the control socket."""
    processes.die_with_parent(lambda: os.getppid() != int(sys.argv[4]))
    _leave_signals_to_the_supervisor()
    # multiprocessing's own folders have the sockets of the fork server and of workers' queues. Killed processes cannot
    # remove theirs, so they are in a folder that the supervisor removes. Ranks inherit this setting.
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = sys.argv[3]
    # The next start finds left semaphores by this prefix.
    config["semprefix"] = f"/{processes.semaphore_prefix(os.environ[processes.RUN_ID_ENV])}"
    # torch leaves a temporary file here for each rank that raises an exception.
    tempfile.tempdir = sys.argv[3]
    # Frozen pages stay shared with the ranks; see `runner.training.preload`.
    gc.disable()
    import torch

    warm = _start_fork_server()
    gc.enable()
    control = socket.socket(fileno=int(sys.argv[1]))
    _log_to_file(Path(sys.argv[2]))
    _take_less_time()
    num_devices = torch.accelerator.device_count()
    protocol.send(control, {"event": "ready", "accelerators": num_devices, "cuda": torch.version.cuda is not None})
    threading.Thread(target=_report_warm, args=(warm, control), daemon=True).start()
    while True:
        try:
            request, _ = protocol.receive(control)
        except OSError:
            return 0
        if "prepare" in request:
            threading.Thread(target=_prepare, args=(request["prepare"], control), daemon=True).start()
            continue
        protocol.send(control, {"event": "torchrun_ended", **_launch(request)})


def _report_warm(warm: int, control: socket.socket) -> None:
    """Tell the runner once ranks can be forked without delay: a node that joins a running attempt must not hold it up.

    `warm` becomes readable then, and when the fork server has died.
    """
    with contextlib.suppress(OSError):
        os.read(warm, 1)
        protocol.send(control, {"event": "warm"})


def _prepare(spec: dict[str, str], control: socket.socket) -> None:
    """Have data prepared, and say when that is over. If it fails or takes too long, the ranks will find out why."""
    process = multiprocessing.get_context("forkserver").Process(target=prepare_main, args=(spec,))
    with contextlib.suppress(Exception):
        process.start()
        process.join(float(spec["limit_s"]))
        process.kill()
        process.join()
    with contextlib.suppress(OSError):
        protocol.send(control, {"event": "prepared"})


def _start_fork_server() -> int:
    """Start multiprocessing's fork server as a fork of this process, which has loaded torch already.

    Otherwise as `multiprocessing.forkserver.ensure_running`. It saves 2 s of processor time (2 cores, 2026-11-22).
    This process must not have started a thread or CUDA before.

    Returns:
        A descriptor that becomes readable once the server has loaded everything.
    """
    warm_r, warm_w = os.pipe()
    server: Any = multiprocessing.forkserver._forkserver
    multiprocessing.forkserver.set_forkserver_preload(PRELOAD)
    if hasattr(server, "_forkserver_authkey"):
        # From Python 3.14 on, the server needs a key that only this function passes to it.
        multiprocessing.forkserver.ensure_running()
        os.close(warm_w)
        return warm_r
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            _serve_forks(listener.fileno(), alive_r, warm_w)
    os.close(alive_r)
    os.close(warm_w)
    # If the server is killed, `multiprocessing` starts another one by itself.
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid
    return warm_r


def _serve_forks(listener: int, alive: int, warm: int) -> NoReturn:
    code = 1
    try:
        name_this_process("fork server")
        processes.set_name(processes.FORK_SERVER_NAME)
        # Close everything else, above all the control socket: it must close when the launcher dies, which is how the
        # supervisor notices.
        kept = sorted([2, listener, alive, warm, os.sysconf("SC_OPEN_MAX")])
        for low, high in itertools.pairwise(kept):
            os.closerange(low + 1, high)
        # That folder is for the launcher; a script's temporary files go where the user wants them.
        tempfile.tempdir = None
        tracker: Any = resource_tracker._resource_tracker
        tracker._fd = tracker._pid = None
        for name in PRELOAD:
            # As the server does, which then finds them loaded.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        os.close(warm)
        multiprocessing.forkserver.main(listener, alive, PRELOAD)
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _fork_server_has_died() -> bool:
    """Return whether the fork server has died, and the ranks with it; `multiprocessing` starts another one."""
    pid = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    try:
        # `multiprocessing` waits for it itself.
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _take_less_time() -> None:
    """Have torchrun wait for the end of a rank where it would sleep and poll.

    It then notices the end of a rank at once, and takes no processor time from the ranks.
    """
    from torch.distributed.elastic import multiprocessing as elastic
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.elastic.multiprocessing import api as output

    # The ranks of the newest attempt.
    newest: list[Any] = []

    class Ranks(output.MultiprocessContext):
        def _start(self) -> None:
            newest[:] = [self]
            # Torch before 2.10 has no option to leave signals alone, and has just installed its handlers.
            _leave_signals_to_the_supervisor()
            self._worker_finished_event = Signal()  # type: ignore[assignment]
            super()._start()  # type: ignore[no-untyped-call]

    def wait(seconds: float) -> None:
        # This call also reaps the ranks that have ended.
        sentinels: list[Any] = [child.sentinel for child in multiprocessing.active_children()]
        if sentinels:
            # A finished rank writes its result to its queue, and does not exit before it was read.
            done = [queue._reader for ranks in newest for queue in ranks._ret_vals.values()]
            connection.wait(sentinels + done, seconds)
        else:
            time.sleep(min(seconds, 0.05))

    # torchrun looks these names up in its modules and has no hook to replace them.
    clock = types.SimpleNamespace(sleep=wait, time=time.time, monotonic=time.monotonic, perf_counter=time.perf_counter)
    setattr(api, "time", clock)  # noqa: B010 - not exported, as the type checker knows
    setattr(elastic, "MultiprocessContext", Ranks)  # noqa: B010


def _leave_signals_to_the_supervisor() -> None:
    """Ignore stop signals and SIGUSR2, which some clusters send to every process of a job (Slurm to a step's).

    The supervisor handles them, and ends this process when the ranks have saved. The fork server inherits the setting.
    """
    for number in (*processes.STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _log_to_file(path: Path) -> None:
    """Send torch's log to a file: it has a traceback for every failed rank, and the user gets the cause in one line."""
    # On a full disk, log records are lost instead of printed.
    logging.raiseExceptions = False
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # What torch's C++ code reports, such as the loss of a store, with its stack.
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    for name in ["torch", *(name for name in logging.root.manager.loggerDict if name.startswith("torch."))]:
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name == "torch" else []
        logger.propagate = name != "torch"


def _launch(request: Message) -> Message:
    """Run one attempt to its end; return `finished`, `failures` that torchrun saw, and `error` if it failed itself."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.launcher.known_nodes import register
    from runner.launcher.rank_logs import RankLogs

    log_dir = Path(request["log_dir"])
    shutil.rmtree(log_dir, ignore_errors=True)
    try:
        log_dir.mkdir(parents=True)
    except OSError as error:
        return {"finished": False, "failures": [], "error": f"{log_dir} cannot be created: {error.strerror}"}
    newer: dict[str, Any] = {
        # Before torch 2.13 it was fixed to this value.
        "shutdown_timeout": _SHUTDOWN_TIMEOUT_S,
        # By default torchrun would install handlers for the signals that are ignored here.
        "signals_to_handle": "SIGQUIT",
    }
    config = LaunchConfig(
        min_nodes=request["nnodes"],
        max_nodes=request["nnodes"],
        nproc_per_node=request["nproc_per_node"],
        # A fresh id for every attempt: no key of an earlier one can match.
        run_id=f"{request['run_id']}-{request['attempt']}",
        rdzv_backend=BACKEND,
        rdzv_configs=request["meeting"],
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        start_method="spawn" if request["cold"] else "forkserver",
        logs_specs=RankLogs(log_dir),
        **{name: value for name, value in newer.items() if hasattr(LaunchConfig, name)},
    )
    register()
    try:
        elastic_launch(config, rank_main)(request["spec"])
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "error_file": failure.error_file}
            for rank, failure in error.failures.items()
        ]
        return {"finished": False, "failures": failures, "fork_server_lost": _fork_server_has_died()}
    except SignalException as error:
        # The supervisor ends this process by closing the control socket, so the signal has another origin.
        return {"finished": False, "failures": [], "error": f"launcher received {signal.Signals(error.sigval).name}"}
    except Exception as error:
        return {"finished": False, "failures": [], "error": f"{type(error).__name__}: {error}"}
    return {"finished": True, "failures": []}


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    try:
        sys.exit(main())
    except (OSError, RuntimeError) as error:
        if not explained(str(error)):
            raise
        print(f"runner: the launcher: {error}", file=sys.stderr)
        sys.exit(EXIT_LIMITED)
