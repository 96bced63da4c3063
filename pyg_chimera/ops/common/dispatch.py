"""Which algorithm computes a call: backends, their verdicts, and what is reported."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

__all__ = ["WHY_FORM", "Backend", "Call", "Choice", "Cost", "UnsuitableSolver"]

Inputs = TypeVar("Inputs")
Structure = TypeVar("Structure")
Result = TypeVar("Result")


#: Why a form is taken, where it was compared with others.
WHY_FORM = {
    "state": "blocks are large: states along edges are faster",
    "mask": "blocks are small: matrix products are faster",
    "chunk": "paths: matrix products in chunks are faster",
}


class Cost(NamedTuple):
    """The predicted cost of an algorithm, forward and backward."""

    operations: float  #: multiplications with an addition
    seconds: float  #: on this CPU, right to a factor of about two
    memory: float  #: bytes, beside the inputs

    def __str__(self) -> str:
        return (
            f"{self.operations:.2g} operations, {self.seconds:.2g} s, "
            f"{self.memory / 2**20:.2g} MiB"
        )


class Choice(NamedTuple):
    """The algorithm of a call, as reported by :func:`~pyg_chimera.ops.explain`."""

    operator: str  #: such as ``"resolvent_mix"``
    solver: str  #: such as ``"sparse"``, or ``"scan"``
    form: str  #: ``"state"``, ``"mask"`` or ``"chunk"``
    backend: str  #: such as ``"numba"``, a name in the operator's ``backends``
    reason: str  #: why
    cost: Cost | None = None  #: what it takes, where that is known
    alternatives: "tuple[Choice, ...]" = ()  #: what would do as well, with their costs

    @property
    def algorithm(self) -> "Choice":
        """The algorithm alone, without its cost."""
        return self._replace(reason="", cost=None, alternatives=())

    def __str__(self) -> str:
        name = f"{self.operator}: {self.solver}, {self.form}, {self.backend}"
        lines = [f"{name} ({self.cost or 'cost unknown'})", f"  because: {self.reason}"]
        for x in self.alternatives:
            lines.append(
                f"  instead: {x.solver}, {x.form}, {x.backend} ({x.cost or x.reason})"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Call(Generic[Inputs, Structure]):
    """One call of an operator."""

    inputs: Inputs  #: its arguments, checked
    structure: Structure  #: what depends on the graph alone
    choice: Choice  #: the algorithm
    key: str  #: of the structure in the cache
    _made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Result]) -> Result:
        """`make()`, once a call: what a verdict has computed, forward need not."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def known(self, name: str, default: Any) -> Any:
        """What has been made of this name, if it has."""
        return self._made.get(name, default)

    def taking(self, choice: Choice) -> "Call[Inputs, Structure]":
        """The same call, by another algorithm."""
        return replace(self, choice=choice)


class UnsuitableSolver(ValueError):
    """A solver that would not compute a call accurately, on whatever backend."""


class Backend(Protocol):
    """A module that computes an operator.

    One without `backward` is plain PyTorch, which autograd differentiates: its
    `forward` returns the output alone. One may have `DEVICES_IF_ASKED`, further types
    of devices that it is not taken for by itself.
    """

    #: Types of devices that it runs on, or None for all.
    DEVICES: tuple[str, ...] | None

    @staticmethod
    def why_not(call: Any) -> str | None:
        """Why it cannot compute a call as chosen; None if it can.

        Raises:
            UnsuitableSolver: If no backend should, with this solver.
        """

    @staticmethod
    def forward(call: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and tensors of its dtype that `backward` needs again."""

    @staticmethod
    def backward(
        call: Any, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of all inputs of floating point, in their order."""
