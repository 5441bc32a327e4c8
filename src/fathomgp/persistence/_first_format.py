"""Files of fathomgp 0.1: a JSON description that named modules, and a safetensors file beside it. Read only."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import time
from typing import Any

import numpy as np

from fathomgp.errors import ModelFileError
from fathomgp.persistence._container import Arrays, check_format, parse, read_tensors

#: Seconds after which a temporary file of a writer of 0.1 has been left behind.
_ABANDONED = 3600.0


class FirstFormat:
    """The bundle ``name`` of a directory, as 0.1 wrote it."""

    def __init__(self, directory: pathlib.Path, name: str):
        self.directory, self.name = directory, name
        self.path = directory / f"{name}.json"

    def exists(self) -> bool:
        """Whether there is one."""
        return self.path.is_file()

    def read(self) -> tuple[Any, Arrays]:
        """Its description, in today's words, and its arrays."""
        body = self._body()
        blob = self._blob(body)
        if hashlib.sha256(blob).hexdigest() != body.get("digest"):
            raise ModelFileError(
                f"{self.directory / body['arrays']} is damaged (its digest does not match {self.path.name}): restore "
                "it from a copy."
            )
        arrays = read_tensors(blob, self.path)
        try:
            return _in_todays_words(body.get("content"), arrays), arrays
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ModelFileError):
                raise
            raise ModelFileError(f"{self.path} is damaged: {type(error).__name__} {str(error)[:200]}.") from None

    def remove(self) -> None:
        """Take away what a newer file has replaced, and what killed writers left."""
        with contextlib.suppress(OSError):  # the newer file is read first: what stays does no harm
            self._remove()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        for blob in self.directory.glob(f"{self.name}-*.safetensors"):
            if self._is_blob(blob.name):
                blob.unlink(missing_ok=True)
        for left in self.directory.glob(f".{self.name}[.-]*"):
            written = re.fullmatch(r"(-[0-9a-f]{16}\.safetensors|\.json)\.\w{8}", left.name[len(self.name) + 1 :])
            if written and time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink(missing_ok=True)

    def _body(self) -> dict[str, Any]:
        raw = _read(self.path)
        body = parse(raw, self.path)
        check_format(body, self.path)
        seal = body.pop("seal", None)
        text = json.dumps(body, sort_keys=True, indent=1).encode()
        sealed = json.dumps({**body, "seal": seal}, sort_keys=True, indent=1).encode()
        # Comparing bytes, not only the seal: a changed blank or order of keys is damage too.
        if raw != sealed or seal != hashlib.sha256(text).hexdigest():
            raise ModelFileError(f"{self.path} is damaged (its seal does not match its content): restore it.")
        return body

    def _blob(self, body: dict[str, Any]) -> bytes:
        name = body.get("arrays")
        if not isinstance(name, str) or not self._is_blob(name):
            raise ModelFileError(f"{self.path} names no file of arrays that fathomgp writes: restore it from a copy.")
        if not (self.directory / name).is_file():
            raise ModelFileError(f"{self.directory} lacks {name!r}, which {self.path.name} names: copy all of it.")
        return _read(self.directory / name)

    def _is_blob(self, name: str) -> bool:
        return re.fullmatch(rf"{re.escape(self.name)}-[0-9a-f]{{16}}\.safetensors", name) is not None


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({os.strerror(error.errno or 0)}): check the path.") from None


def _in_todays_words(spec: Any, arrays: Arrays) -> Any:
    """Tags instead of the names of modules, kinds of strings instead of types of a width, and today's fields."""
    if isinstance(spec, list):
        return [_in_todays_words(item, arrays) for item in spec]
    if not isinstance(spec, dict):
        return spec
    words = {key: _in_todays_words(value, arrays) for key, value in spec.items()}
    match words.get("is"):
        case "object" if isinstance(words.get("class"), str):
            name = words.pop("class")
            words["tag"] = TAGS.get(name, name)
            if words["tag"] in _CHANGED:
                _CHANGED[words["tag"]](words["fields"], arrays)
        case "strings" if isinstance(words.get("dtype"), str):
            words["kind"] = words.pop("dtype").strip("|<>=")[:1]
    return words


def _give_online_gp_a_root(fields: dict[str, Any], arrays: Arrays) -> None:
    """0.1 kept Q = V^T V and Q mu where V is kept now."""
    arrays.pop(fields.pop("weights")["at"])
    place = fields.pop("inverse")
    Q = arrays[place["at"]]
    values, vectors = np.linalg.eigh(Q)
    # Slots that are not active hold zeros in Q; so do rows and columns of V.
    active = np.diagonal(Q) > 0.0
    V = np.zeros_like(Q)
    V[active] = (np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T)[np.argsort(values)[len(Q) - active.sum() :]]
    V[:, ~active] = 0.0
    arrays[place["at"]] = V
    fields["root"] = place


def _say_auto(fields: dict[str, Any], arrays: Arrays) -> None:
    """What 0.1 left to SGHMC was ``None``, and is ``"auto"`` now."""
    for name in ("step_size", "hyperparameters", "energy"):
        if fields[name] is None:
            fields[name] = "auto"


#: Classes whose fields have changed since 0.1.
_CHANGED = {"sequential/online-gp": _give_online_gp_a_root, "method/sghmc": _say_auto}
#: What 0.1 called the classes that have tags now.
TAGS = {
    "fathomgp.data._scaling.Standardizer": "data/standardizer",
    "fathomgp.inference._latent_inputs.LatentInputsPosterior": "posterior/latent-inputs",
    "fathomgp.inference._layered.LayeredPosterior": "posterior/layered",
    "fathomgp.inference._mcmc.EllipticalSlice": "sampler/elliptical-slice",
    "fathomgp.inference._mcmc.MALA": "sampler/mala",
    "fathomgp.inference._mcmc.PCN": "sampler/pcn",
    "fathomgp.inference._online.OnlineGP": "sequential/online-gp",
    "fathomgp.inference._propagation.Matched": "posterior/matched",
    "fathomgp.inference._propagation.PropagatedPosterior": "posterior/propagated",
    "fathomgp.inference._sampled.SampledPosterior": "posterior/sampled",
    "fathomgp.inference._stride_hidden.Hidden": "stride/hidden",
    "fathomgp.inference._stride_posterior.Given": "stride/given",
    "fathomgp.inference._stride_posterior.STRIDEPosterior": "posterior/stride",
    "fathomgp.inference._stride_posterior.Trace": "stride/trace",
    "fathomgp.inference._stride_top.Conditioned": "stride/conditioned",
    "fathomgp.inference._stride_top.Top": "stride/top",
    "fathomgp.inference._stride_top.Whitening": "stride/whitening",
    "fathomgp.inference.aep.AEP": "method/aep",
    "fathomgp.inference.decoupled.Decoupled": "method/decoupled",
    "fathomgp.inference.dsvi.DSVI": "method/dsvi",
    "fathomgp.inference.ep.EP": "method/ep",
    "fathomgp.inference.exact.Exact": "method/exact",
    "fathomgp.inference.exact.ExactPosterior": "posterior/exact",
    "fathomgp.inference.meanfield.MeanField": "method/meanfield",
    "fathomgp.inference.sequential.Sequential": "method/sequential",
    "fathomgp.inference.sequential.SequentialPosterior": "posterior/sequential",
    "fathomgp.inference.sequential.SequentialState": "sequential/state",
    "fathomgp.inference.sghmc.SGHMC": "method/sghmc",
    "fathomgp.inference.sgpr.SGPR": "method/sgpr",
    "fathomgp.inference.stride.STRIDE": "method/stride",
    "fathomgp.kernels._algebra.Product": "kernel/product",
    "fathomgp.kernels._algebra.Sum": "kernel/sum",
    "fathomgp.kernels._bumps.Bumps": "kernel/bumps",
    "fathomgp.kernels._dot_product.ArcCosine": "kernel/arc-cosine",
    "fathomgp.kernels._dot_product.Linear": "kernel/linear",
    "fathomgp.kernels._dot_product.NeuralNetwork": "kernel/neural-network",
    "fathomgp.kernels._dot_product.Polynomial": "kernel/polynomial",
    "fathomgp.kernels._nonstationary.Convolution": "kernel/convolution",
    "fathomgp.kernels._simple.Constant": "kernel/constant",
    "fathomgp.kernels._simple.White": "kernel/white",
    "fathomgp.kernels._squashed.Squashed": "kernel/squashed",
    "fathomgp.kernels._stationary.Matern12": "kernel/matern12",
    "fathomgp.kernels._stationary.Matern32": "kernel/matern32",
    "fathomgp.kernels._stationary.Matern52": "kernel/matern52",
    "fathomgp.kernels._stationary.Periodic": "kernel/periodic",
    "fathomgp.kernels._stationary.RBF": "kernel/rbf",
    "fathomgp.kernels._stationary.RationalQuadratic": "kernel/rational-quadratic",
    "fathomgp.likelihoods._bernoulli.Bernoulli": "likelihood/bernoulli",
    "fathomgp.likelihoods._gaussian.Gaussian": "likelihood/gaussian",
    "fathomgp.likelihoods._gaussian.HeteroscedasticGaussian": "likelihood/heteroscedastic-gaussian",
    "fathomgp.likelihoods._poisson.Poisson": "likelihood/poisson",
    "fathomgp.likelihoods._robustmax.RobustMax": "likelihood/robust-max",
    "fathomgp.likelihoods._softmax.Softmax": "likelihood/softmax",
    "fathomgp.likelihoods._student_t.StudentT": "likelihood/student-t",
    "fathomgp.linalg._cholesky.Factor": "linalg/factor",
    "fathomgp.linalg._cholesky.JitterPolicy": "linalg/jitter-policy",
    "fathomgp.linalg._cholesky.JitterReport": "linalg/jitter-report",
    "fathomgp.linalg._lowrank.LowRankPlusDiagonal": "linalg/low-rank-plus-diagonal",
    "fathomgp.linalg._pivoted.PivotedCholesky": "linalg/pivoted-cholesky",
    "fathomgp.means.Constant": "mean/constant",
    "fathomgp.means.Linear": "mean/linear",
    "fathomgp.means.Zero": "mean/zero",
    "fathomgp.model._architectures.Composition": "architecture/composition",
    "fathomgp.model._architectures.ConvolutionArchitecture": "architecture/convolution",
    "fathomgp.model._architectures.Injective": "architecture/injective",
    "fathomgp.model._conditional.Conditional": "model/conditional",
    "fathomgp.model._conditional.Informed": "model/informed",
    "fathomgp.model._conditional.MeanTerm": "model/mean-term",
    "fathomgp.model._conditional.Whitened": "model/whitened",
    "fathomgp.model._conditional.Whitener": "model/whitener",
    "fathomgp.model._deep.DeepGP": "model/deep-gp",
    "fathomgp.model._deep.Layer": "model/layer",
    "fathomgp.model._recipes.Recipe": "model/recipe",
    "fathomgp.parameters.Parameter": "model/parameter",
}
