"""Which kernels the layers of a model call: chosen once, after loading, for the whole model."""

from torch import nn

from eaglecli.kernels.model_kernels import FASTEST, ModelKernels


class KernelUser(nn.Module):
    """A module that calls kernels through `self.kernels`."""

    kernels: ModelKernels = FASTEST


def use_kernels(model: nn.Module, kernels: ModelKernels) -> None:
    """Let every layer of a target or a draft call these. An engine must not hold graphs of the model at that time."""
    for module in model.modules():
        if isinstance(module, KernelUser):
            module.kernels = kernels
