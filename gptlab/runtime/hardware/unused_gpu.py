"""Why torch cannot use an NVIDIA GPU that the machine has, and what to do."""

from __future__ import annotations

import re
import warnings

import torch

_INSTALL = "https://pytorch.org/get-started/locally/ shows how to install one that fits"


def cuda_problem(index: int) -> str | None:
    """Why torch cannot compute on CUDA device `index`; None where it can, as far as is known without trying."""
    with warnings.catch_warnings(action="ignore"):  # torch's own, of many lines
        this = f"torch {torch.__version__}"
        if torch.cuda.is_available():  # a device that is not there is refused elsewhere, by its number
            return _missing_kernels(index, this) if index < torch.cuda.device_count() else None
        if torch.version.cuda is None:
            return f"{this} is a build without CUDA; {_INSTALL}"
        try:
            torch.cuda.init()
            reason = "it sees no device"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0].partition(" Please ")[0].rstrip(".")
        return f"{this} (CUDA {torch.version.cuda}): {reason}; update the driver, or torch: {_INSTALL}"


def _missing_kernels(index: int, this: str) -> str | None:
    built = torch.cuda.get_arch_list() if torch.version.cuda is not None else []  # ROCm's have other names
    if not built or any(_runs(kind, torch.cuda.get_device_capability(index)) for kind in built):
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return (
        f"{this} is built for {' '.join(built)}, and {torch.cuda.get_device_name(index)} has compute capability "
        f"{major}.{minor}; {_INSTALL}"
    )


def _runs(kind: str, capability: tuple[int, int]) -> bool:
    """Whether code for `kind` (such as sm_86) runs on a device: binaries within one major version, upwards; PTX
    (compute_120) on everything newer (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility")."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", kind)
    if match is None:
        return True  # a name of the future
    built_for = int(match[2]), int(match[3])
    return capability >= built_for and (match[1] == "compute" or capability[0] == built_for[0])
