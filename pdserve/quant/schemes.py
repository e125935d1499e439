"""Named ways of quantising a model's linears, and what each name means.

What lives here: the table. What does not: carrying a scheme out (`pdserve.calibrate`).

A name is weights, activations, method, group: `w4a16-awq-g64`. Activations: a16 stay as they are, a8 are
quantised (one scale for each token; with 4-bit weights one for each token and group). Weights of 4 bits have
integer zeros unless the name says `sym`. Methods: `rtn` (round to nearest), `clip` (with a search for
narrower ranges), `smoothquant`, `awq` (with clipping), `gptq`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.quant.forms import NO_ACTIVATION, Activation, ActivationKind
from pdserve.quant.rounding import Grid

GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """method: rtn, clip, smoothquant, awq, gptq or float8. grid: of integer weights, None for FP8.

    activation: the form of inputs; `static` ones get their scale in calibration. float8: e4m3 or e5m2, for
    weights of FP8; float8_inputs: inputs too, with a scale for each token.
    """

    name: str
    method: str
    grid: Grid | None = None
    activation: Activation = NO_ACTIVATION
    static: bool = False
    float8: str = ""
    float8_inputs: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether it needs text."""
        return self.static or self.method in ("smoothquant", "awq", "gptq", "clip")

    @property
    def quantises_inputs(self) -> bool:
        """Whether activations are quantised too."""
        return self.static or self.float8_inputs or self.activation.kind is not ActivationKind.NONE


TOKEN = Activation(kind=ActivationKind.TOKEN)
HEAD_INPUT = Activation(kind=ActivationKind.TOKEN_GROUP, group_size=32)
"""Of the head, where activations are quantised: its errors are the tokens', and few rows reach it."""


def _int8() -> list[Scheme]:
    grid = Grid(bits=8)
    return [
        Scheme(name="w8a16-rtn", method="rtn", grid=grid),
        Scheme(name="w8a8-rtn", method="rtn", grid=grid, activation=TOKEN),
        Scheme(name="w8a8-static", method="rtn", grid=grid, static=True),
        Scheme(name="w8a8-smoothquant", method="smoothquant", grid=grid, activation=TOKEN),
        Scheme(name="w8a8-smoothquant-static", method="smoothquant", grid=grid, static=True),
    ]


def _int4(group: int) -> list[Scheme]:
    plain, even = Grid(bits=4, group_size=group, symmetric=False), Grid(bits=4, group_size=group)
    clipped = Grid(bits=4, group_size=group, symmetric=False, clip=True)
    inputs = Activation(kind=ActivationKind.TOKEN_GROUP, group_size=group)
    return [
        Scheme(name=f"w4a16-rtn-g{group}", method="rtn", grid=plain),
        Scheme(name=f"w4a16-rtn-sym-g{group}", method="rtn", grid=even),
        Scheme(name=f"w4a16-clip-g{group}", method="clip", grid=clipped),
        Scheme(name=f"w4a16-awq-g{group}", method="awq", grid=plain),
        Scheme(name=f"w4a16-gptq-g{group}", method="gptq", grid=plain),
        Scheme(name=f"w4a8-rtn-g{group}", method="rtn", grid=plain, activation=inputs),
        Scheme(name=f"w4a8-awq-g{group}", method="awq", grid=plain, activation=inputs),
    ]


def _float8(kind: str) -> list[Scheme]:
    return [
        Scheme(name=f"w8a16-fp8-{kind}", method="float8", float8=kind),
        Scheme(name=f"w8a8-fp8-{kind}", method="float8", float8=kind, float8_inputs=True),
    ]


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        *_int8(),
        *(scheme for group in GROUPS for scheme in _int4(group)),
        *(scheme for kind in ("e4m3", "e5m2") for scheme in _float8(kind)),
    )
}
"""Every scheme by name."""

SHORT = {
    "w4a16-awq": "w4a16-awq-g32", "w4a16-gptq": "w4a16-gptq-g32", "w4a16-rtn": "w4a16-rtn-g32",
    "w4a8-awq": "w4a8-awq-g32", "w4a8-rtn": "w4a8-rtn-g32", "fp8": "w8a8-fp8-e4m3",
}  # fmt: skip
"""Names without their group."""


def scheme_of(name: str, option: str) -> Scheme:
    """The scheme called so. option: which setting named it. Raises ConfigError for an unknown name."""
    found = SCHEMES.get(SHORT.get(name, name))
    if found is None:
        raise ConfigError(f"{option}: must be one of {', '.join((*SHORT, *SCHEMES))}")
    return found
