"""GPyTorch's training step as a worker of step_time.py, in the setup that was fastest for it here.

Denormals flushed, length scale 2, scaled linear means: ``python gpytorch_step.py [float32|float64]``.
"""

import sys
import warnings

import gpytorch
import torch
from cases import NUM_DATA, batch, gemm_gflops, layer_widths, serve
from gpytorch.mlls import DeepApproximateMLL, VariationalELBO
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

warnings.filterwarnings("ignore")
torch.set_flush_denormal(True)
DTYPE = sys.argv[1] if len(sys.argv) > 1 else "float32"
torch.set_default_dtype(getattr(torch, DTYPE))


class GPLayer(DeepGPLayer):
    """RBF-ARD outputs, one kernel each, as GPyTorch's own examples have them."""

    def __init__(self, width_in, width_out, num_inducing, last):
        shape = torch.Size([] if last else [width_out])
        q = CholeskyVariationalDistribution(num_inducing, batch_shape=shape)
        inducing = torch.randn(*shape, num_inducing, width_in)
        super().__init__(
            VariationalStrategy(self, inducing, q, learn_inducing_locations=True), width_in, None if last else width_out
        )
        rbf = gpytorch.kernels.RBFKernel(batch_shape=shape, ard_num_dims=width_in)
        self.covar_module = gpytorch.kernels.ScaleKernel(rbf, batch_shape=shape)
        self.mean_module = gpytorch.means.ConstantMean() if last else gpytorch.means.LinearMean(width_in)
        self.covar_module.outputscale = rbf.lengthscale = 2.0
        if not last:
            self.mean_module.weights.data.mul_(width_in**-0.5)

    def forward(self, x):
        """The prior at x."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Model(DeepGP):
    """Layers in a row."""

    def __init__(self, depth, inner, num_inducing):
        super().__init__()
        widths = enumerate(layer_widths(depth, inner))
        self.layers = torch.nn.ModuleList(GPLayer(i, o, num_inducing, number == depth - 1) for number, (i, o) in widths)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.likelihood.noise = 0.01

    def forward(self, x):
        """The last layer's distribution."""
        for layer in self.layers:
            x = layer(x)
        return x


def make_step(depth, inner, num_inducing, size):
    torch.manual_seed(0)
    x, y = (torch.as_tensor(part) for part in batch(size, DTYPE))
    model = Model(depth, inner, num_inducing).train()
    objective = DeepApproximateMLL(VariationalELBO(model.likelihood, model, num_data=NUM_DATA))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)

    def step():
        with gpytorch.settings.num_likelihood_samples(1):
            optimiser.zero_grad()
            loss = -objective(model(x), y[:, 0])
            loss.backward()
            optimiser.step()

    return step


def peak():
    a = torch.randn(2000, 2000)
    return gemm_gflops(lambda: a @ a)


serve(make_step, peak)
