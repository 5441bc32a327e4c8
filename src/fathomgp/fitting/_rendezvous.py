"""Processes wait for each other before JAX does, whose runtime ends those that waited in vain by SIGABRT.

Process 0 listens at the coordinator's address, the others say their ranks there, and when all have come it tells them
to go on and leaves the port to JAX. Neither this nor JAX's own service asks who is speaking: whoever reaches the port
can join a job or stop it, so it is bound to the address that was given and to no other where that can be done.
"""

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import time

from fathomgp.errors import FitWarning, SettingError
from fathomgp.notices import tell

#: Seconds that a caller has to say its rank; who only tries the port is sent away.
_SHORT = 5.0
_GO = b"go\n"
_BYE = b"bye\n"


def split_address(coordinator: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host stands in brackets."""
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):(\d{1,5})", coordinator)
    if found is None or not 0 < int(found[2]) < 65536:
        raise SettingError(f"The coordinator is {coordinator!r}: give host:port, as in localhost:9911.")
    return found[1].strip("[]"), int(found[2])


def bind_address(coordinator: str) -> str:
    """Where the coordinator listens: at its own address, or everywhere if that is not one of this machine's."""
    host, port = split_address(coordinator)
    if any(_is_ours(address) for address in _addresses(host)):
        return coordinator
    tell(
        f"{host} is no address of this machine (of a gateway, perhaps), so the coordinator listens on all interfaces: "
        f"whoever reaches port {port} can join or stop the job.",
        FitWarning,
        stacklevel=3,
    )
    return f"[::]:{port}"


def gather(address: str, num_processes: int, patience: float) -> None:
    """Wait at ``address`` until all other processes have come, and tell them to go on.

    Args:
        address: where to listen.
        num_processes: how many there are, with this one.
        patience: seconds to wait at most.
    """
    until = time.monotonic() + patience
    callers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(_listen(address))
        while True:
            for rank in [rank for rank, caller in callers.items() if _has_gone(caller)]:
                del callers[rank]
            if len(callers) == num_processes - 1:
                break
            server.settimeout(max(0.01, min(1.0, until - time.monotonic())))
            with contextlib.suppress(TimeoutError):
                caller = opened.enter_context(server.accept()[0])
                said = _hear_rank(caller, num_processes)
                if said is not None:
                    callers[said] = caller
            if time.monotonic() > until:
                missing = ", ".join(str(rank) for rank in range(1, num_processes) if rank not in callers)
                raise SettingError(
                    f"Of {num_processes} processes, those of rank {missing} did not come within {patience:g} s: start "
                    f"them, and check that they can reach {address}."
                )
        for caller in callers.values():
            with contextlib.suppress(OSError):
                caller.sendall(_GO)
                kept = caller.dup()
                kept.settimeout(_SHORT)
                atexit.register(_take_leave, kept)


def announce(coordinator: str, rank: int, num_processes: int, patience: float) -> None:
    """Say this process's rank to the coordinator, and wait until all have come.

    Args:
        coordinator: ``host:port`` of process 0.
        rank: of this process.
        num_processes: how many there are.
        patience: seconds to wait at most.
    """
    until = time.monotonic() + patience
    while (left := until - time.monotonic()) > 0:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(coordinator), min(left, _SHORT)) as line,
        ):
            line.sendall(f"fathomgp {rank} of {num_processes}\n".encode())
            line.settimeout(max(0.01, until - time.monotonic()))
            answer = line.recv(256)
            if answer == _GO:
                line.settimeout(None)
                threading.Thread(target=_watch, args=(line.dup(), coordinator, rank), daemon=True).start()
                return
            if answer.startswith(b"no: "):
                raise SettingError(answer[4:].decode(errors="replace").strip())
        time.sleep(0.2)
    raise SettingError(
        f"The coordinator at {coordinator} did not call within {patience:g} s: start process 0 there, and check "
        "the address and that all other processes have been started."
    )


def _take_leave(line: socket.socket) -> None:
    """Tell a process that this one ends in order. Runs before JAX's own farewell, which was registered earlier."""
    with contextlib.suppress(OSError):
        line.sendall(_BYE)


def _watch(line: socket.socket, coordinator: str, rank: int) -> None:
    """End this process in words when the coordinator has gone: JAX's runtime would end it by SIGABRT, with a trace."""
    with contextlib.suppress(OSError):
        if line.recv(16):
            return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    sentence = (
        f"Error: Process {rank} lost another process of the job, the coordinator at {coordinator}: start the job "
        "again; it goes on from its last checkpoint.\n"
    )
    os.write(2, sentence.encode())
    os._exit(2)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingError(f"The coordinator's host {host!r} has no address ({error.strerror}): check it.") from None
    return [(family, str(place[0])) for family, _, _, _, place in found]


def _is_ours(address: tuple[socket.AddressFamily, str]) -> bool:
    family, host = address
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((host, 0))
        return True
    return False


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family, place = next(a for a in _addresses(host) if _is_ours(a))
    try:
        return socket.create_server((place, port), family=family)
    except OSError as error:
        raise SettingError(
            f"The coordinator cannot listen at {address} ({error.strerror}): choose another port."
        ) from None


def _hear_rank(caller: socket.socket, num_processes: int) -> int | None:
    caller.settimeout(_SHORT)
    try:
        said = re.fullmatch(rb"fathomgp (\d+) of (\d+)\n", caller.recv(64))
        if said is None:
            return None
        rank, count = int(said[1]), int(said[2])
        if count != num_processes or not 0 < rank < num_processes:
            sentence = f"Process {rank} was told of {count} processes, but process 0 of {num_processes}: check both."
            caller.sendall(f"no: {sentence}".encode())
            return None
        return rank
    except OSError:
        return None


def _has_gone(caller: socket.socket) -> bool:
    """Whether a caller has hung up: it says nothing more while it waits."""
    caller.setblocking(False)
    try:
        return caller.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        caller.setblocking(True)
