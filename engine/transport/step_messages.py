"""Messages between engines that step together and the hub (DPCoordinator) that coordinates their
steps."""

import msgspec

from hpu.protocol import Bucket


class JoinSteps(msgspec.Struct, array_like=True, gc=False, tag=1):
    """First message of an engine to the hub."""

    engine: int
    settings: int
    """Checksum of the settings that must be equal on all engines."""


class StepProposal(msgspec.Struct, array_like=True, gc=False, tag=2):
    """Buckets of the launches that an engine has planned for a step; empty if it has no work and
    only participates."""

    step: int
    buckets: list[Bucket]


class StepCall(msgspec.Struct, array_like=True, gc=False, tag=3):
    """Another engine has proposed this step: answer with a StepProposal."""

    step: int


class AgreedStep(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Proposals of all engines for a step, by engine. The answer to JoinSteps has step -1 and no
    proposals."""

    step: int
    planned: list[list[Bucket]]


class StepsRefused(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The settings of the engines differ; the engine raises a ConfigError."""

    message: str


ToHub = JoinSteps | StepProposal
FromHub = StepCall | AgreedStep | StepsRefused
