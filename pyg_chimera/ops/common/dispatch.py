"""The choice of an algorithm: calls, backends, costs and the reported choice."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

Inputs = TypeVar("Inputs")
Structure = TypeVar("Structure")
Result = TypeVar("Result")


class Cost(NamedTuple):
    """The predicted cost of an operator's call, forward and backward.

    What a layer computes around the operator is not included.
    """

    operations: float  #: multiply-adds
    seconds: float  #: on this CPU, accurate to a factor of about two
    #: The most bytes that the call adds at a time, likewise: what the algorithm holds,
    #: the output and all gradients, but not the inputs.
    memory: float
    #: What the seconds are made of: the algorithm's steps, and how many of each.
    steps: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"forward and backward: {self.operations:.2g} operations, "
            f"{self.seconds:.2g} s, {self.memory / 2**20:.2g} MiB"
        )


class Choice(NamedTuple):
    """The algorithm of a call, as reported by :func:`~pyg_chimera.ops.explain`."""

    operator: str  #: such as ``"resolvent_mix"``
    solver: str  #: such as ``"sparse"``, or ``"scan"``
    form: str  #: ``"state"``, ``"mask"``, ``"chunk"``, or ``"edge"`` of attention
    backend: str  #: such as ``"numba"``, a name in the operator's ``backends``
    reason: str  #: why it was chosen
    cost: Cost | None = None  #: the predicted cost, if known
    alternatives: "tuple[Choice, ...]" = ()  #: other suitable algorithms, with costs

    @property
    def algorithm(self) -> "Choice":
        """The algorithm alone, without reason, cost and alternatives."""
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

    inputs: Inputs  #: the checked arguments
    structure: Structure  #: what depends on the graph alone
    choice: Choice  #: the algorithm
    key: str  #: the structure's key in the cache
    _made: dict[str, Any] = field(default_factory=dict)

    def cached(self, name: str, make: Callable[[], Result]) -> Result:
        """`make()`, evaluated once per call, which `why_not` and `forward` share."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def get(self, name: str, default: Any) -> Any:
        """The value that `cached` has computed under this name, or the default."""
        return self._made.get(name, default)

    def with_choice(self, choice: Choice) -> "Call[Inputs, Structure]":
        """The same call with another algorithm."""
        return replace(self, choice=choice)

    def with_inputs(self, inputs: Inputs) -> "Call[Inputs, Structure]":
        """The same call with other inputs."""
        return replace(self, inputs=inputs)


class UnsuitableSolver(ValueError):
    """Raised for a solver that would be inaccurate for a call on any backend."""


class Backend(Protocol):
    """A module that computes an operator.

    A backend without `backward` consists of plain PyTorch operations, which autograd
    differentiates; its `forward` returns only the output. One without `why_not`
    supports all calls. `DEVICES_IF_ASKED` is optional: further device types, on which
    the backend is used only if requested.
    """

    #: The device types that it runs on, or None for all.
    DEVICES: tuple[str, ...] | None

    @staticmethod
    def why_not(call: Any) -> str | None:
        """Why it cannot compute a call with the chosen algorithm; None if it can.

        Raises:
            UnsuitableSolver: If no backend should use this solver.
        """

    @staticmethod
    def forward(call: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and tensors of its dtype that are saved for `backward`."""

    @staticmethod
    def backward(
        call: Any, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of all floating-point inputs, in their order."""
