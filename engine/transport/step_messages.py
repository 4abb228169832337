"""Messages between engines that step together and the hub that they agree over."""

import msgspec

from hpu.protocol import Bucket


class JoinSteps(msgspec.Struct, array_like=True, gc=False, tag=1):
    """The first message of an engine."""

    engine: int
    settings: int
    """Checksum of what all engines must have alike."""


class StepProposal(msgspec.Struct, array_like=True, gc=False, tag=2):
    """What an engine has planned for a step: the buckets of its launches, none if it only takes
    part."""

    step: int
    buckets: list[Bucket]


class StepCall(msgspec.Struct, array_like=True, gc=False, tag=3):
    """Another engine has planned this step: propose something, too."""

    step: int


class AgreedStep(msgspec.Struct, array_like=True, gc=False, tag=4):
    """The proposals of all engines, by engine. Of JoinSteps the first one, of step -1."""

    step: int
    planned: list[list[Bucket]]


class StepsRefused(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The engines do not fit each other: a ConfigError."""

    message: str


ToHub = JoinSteps | StepProposal
FromHub = StepCall | AgreedStep | StepsRefused
