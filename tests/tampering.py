"""Model files opened, changed and sealed again, as a hostile hand would."""

import hashlib
import json
import pathlib

from safetensors.numpy import load, save

from fathomgp.persistence import _container


def read_description(path):
    """What a file says it holds."""
    blob = pathlib.Path(path).read_bytes()
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return json.loads(header["__metadata__"]["fathomgp"])


def write_description(path, description, arrays=None, *, summaries=False):
    """Put a description into a file, with its arrays or others, and seal it.

    Args:
        path: the file.
        description: what it is to say.
        arrays: its new arrays.
        summaries: whether the list of arrays is to be true again.
    """
    path = pathlib.Path(path)
    arrays = load(path.read_bytes()) if arrays is None else arrays
    description = {"seal": "0" * 64} | {key: value for key, value in description.items() if key != "seal"}
    if summaries:
        description["tensors"] = {name: _container._summary(array) for name, array in arrays.items()}
    blob = save(arrays, metadata={"fathomgp": json.dumps(description)})
    blank = b'"{\\"seal\\": \\"' + b"0" * 64
    assert blank in blob
    digest = hashlib.sha256(blob).hexdigest().encode()
    path.write_bytes(blob.replace(blank, blank[:-64] + digest, 1))
