"""Joining the processes of a job: JAX's own runtime, with a patience that suits a person."""

import os

import jax

from fathomgp.errors import SettingError
from fathomgp.fitting._rendezvous import announce, bind_address, gather, split_address

#: Seconds without a sign of life after which a process counts as lost: JAX's own is 100.
HEARTBEAT_SECONDS = 30


def start_distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    patience: float = 300.0,
) -> None:
    """Join the other processes of a job; call it before anything else that uses JAX.

    Without arguments the job is found as JAX finds it: from Slurm, Open MPI or Kubernetes. With them, process 0 listens
    at the coordinator's address and at no other, if that is one of its machine's; who reaches the port is not asked who
    they are (``docs/security.md``).

    Args:
        coordinator: ``host:port`` of process 0, the same for all.
        num_processes: how many there are.
        process_id: which of them this one is, from 0.
        patience: seconds that processes wait for each other at the start.
    """
    given = (coordinator, num_processes, process_id)
    if any(part is not None for part in given) and any(part is None for part in given):
        raise SettingError("A distributed fit needs the coordinator, the number of processes and the rank: give all.")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise SettingError(f"The rank is {process_id}, but {num_processes} processes are numbered from 0: check both.")
    bind = None
    if coordinator is not None:
        bind = _meet(coordinator, num_processes or 1, process_id or 0, patience)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            coordinator_bind_address=bind,
            initialization_timeout=max(1, int(patience)),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        raise SettingError(
            f"No job of Slurm, Open MPI or Kubernetes was found ({error}): "
            "give the coordinator (host:port), the number of processes and the rank."
        ) from error
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingError(f"The processes did not find each other ({reason}): check the coordinator.") from error


def _meet(coordinator: str, num_processes: int, rank: int, patience: float) -> str | None:
    """Wait until all processes are there; returns where process 0 listens."""
    split_address(coordinator)
    if rank > 0:
        announce(coordinator, rank, num_processes, patience)
        return None
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or bind_address(coordinator)
    gather(bind, num_processes, patience)
    return bind


def is_first_process() -> bool:
    """Whether this process writes for all."""
    return jax.process_index() == 0
