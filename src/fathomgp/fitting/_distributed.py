"""Joining the processes of a job: JAX's own runtime, with a patience that suits a person."""

import jax

from fathomgp.errors import SettingError

#: Seconds without a sign of life after which a process counts as lost: JAX's own is 100.
HEARTBEAT_SECONDS = 30
#: Seconds that processes wait for each other at the start.
_START_SECONDS = 300


def start_distributed(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of a job; call it before anything else that uses JAX.

    Without arguments the job is found as JAX finds it: from Slurm, Open MPI or Kubernetes.

    Args:
        coordinator: ``host:port`` of process 0, the same for all.
        num_processes: how many there are.
        process_id: which of them this one is, from 0.
    """
    given = (coordinator, num_processes, process_id)
    if any(part is not None for part in given) and any(part is None for part in given):
        raise SettingError("A distributed fit needs the coordinator, the number of processes and the rank: give all.")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise SettingError(f"The rank is {process_id}, but {num_processes} processes are numbered from 0: check both.")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=_START_SECONDS,
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


def is_first_process() -> bool:
    """Whether this process writes for all."""
    return jax.process_index() == 0
