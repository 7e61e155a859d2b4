"""Where kernels can run here: on a machine with an accelerator both compiled and interpreted."""

import os

import pytest

from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.core.targets import Target

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Whether many more cases are drawn."""


def _devices(name):
    """Platform -> its first device, in the terms of the backend's framework."""
    framework = frameworks()[registry.backend(name).framework]
    framework.load()
    return {framework.target(d).platform: d for d in reversed(list(framework.devices()))}


def runnable_platforms():
    """(backend, platform) of everything that can run here; a backend that cannot is skipped with its reason."""
    for name, backend in sorted(registry.backends().items()):
        if backend.unavailable():
            yield pytest.param(name, None, marks=pytest.mark.skip(reason=backend.unavailable()))
            continue
        for platform in sorted(_devices(name)):
            if backend.families_for(Target(platform)):
                yield pytest.param(name, platform, id=f"{name}-{platform}")


def device_at(name, platform):
    """The device of a place."""
    return _devices(name)[platform]
