"""Small arrays from every process to every process."""

import io

import numpy as np


def exchange_arrays(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The arrays of all processes, in the order of their ranks; shapes may differ from process to process."""
    from jax.experimental.multihost_utils import process_allgather

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    mine = np.frombuffer(buffer.getvalue(), np.uint8)
    lengths = np.asarray(process_allgather(np.asarray([len(mine)], np.int32))).ravel()
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(mine)] = mine
    everyone = np.asarray(process_allgather(padded)).reshape(len(lengths), -1)
    return [_unpack(row[:length].tobytes()) for row, length in zip(everyone, lengths, strict=True)]


def _unpack(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}
