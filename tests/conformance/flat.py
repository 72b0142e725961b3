"""Maps of several branches in the form of maps of one tensor, so that the suites can run on them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from opteq.equation import Equation, Gradients, Linearization, Reformulation, SymmetricForm
from opteq.maps.base import EquilibriumMap
from opteq.results import Certificate, State
from opteq.solvers.space import Space


class Flattened(EquilibriumMap):
    """The branches of a map laid side by side in one state `(batch, n)`."""

    def __init__(self, map: EquilibriumMap):
        super().__init__()
        self.map = map

    def bind(self, x: State, error: float = 0.0) -> "FlatEquation":
        equation = self.map.bind(x, error)
        return FlatEquation(equation, Space(equation.initial()))

    @property
    def injections(self):
        return self.map.injections


@dataclass(frozen=True, eq=False)
class FlatEquation(Equation):
    inner: Equation
    space: Space

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors

    def with_tensors(self, tensors):
        return replace(self, inner=self.inner.with_tensors(tensors))

    def initial(self) -> Tensor:
        return self.space.flatten(self.inner.initial())

    def first_iterate(self) -> Tensor:
        return self.space.flatten(self.inner.first_iterate())

    def __call__(self, state) -> Tensor:
        return self.space.flatten(self.inner(self.space.restore(state)))

    def reformulate(self, gradient: bool = False) -> Reformulation:
        form = self.inner.reformulate(gradient)
        own = Space(form.initial)
        recover = form.recover
        return Reformulation(
            lambda u: own.flatten(form.function(own.restore(u))),
            own.flatten(form.initial),
            own.flatten(form.first),
            None if recover is None else lambda u: self.space.flatten(recover(own.restore(u))),
            form.gain,
            form.size,
        )

    @property
    def structure(self) -> str:
        return self.inner.structure

    @property
    def objective(self):
        inner = self.inner.objective
        return None if inner is None else lambda state: inner(self.space.restore(state))

    def contraction(self, state=None) -> Certificate:
        return self.inner.contraction(None if state is None else self.space.restore(state))

    def curvature(self, state=None) -> Certificate:
        return self.inner.curvature(None if state is None else self.space.restore(state))

    def distance_bound(self, state) -> Certificate:
        return self.inner.distance_bound(self.space.restore(state))

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        return self.inner.rates(pushes)

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        return self.inner.equilibrium_lipschitz(pushes)

    def linearize(self, state) -> Linearization:
        return FlatLinearization(self.inner.linearize(self.space.restore(state)), self.space, state)


class FlatLinearization(Linearization):
    def __init__(self, inner: Linearization, space: Space, state: Tensor):
        self._inner, self._space, self._state = inner, space, state

    @property
    def image(self) -> Tensor:
        return self._space.flatten(self._inner.image)

    @property
    def symmetric(self) -> SymmetricForm | None:
        form = self._inner.symmetric
        if form is None:
            return None
        restore, pullback, metric = self._space.restore, form.pullback, form.metric
        # The variable of the form need not have the shape of the state.
        own = Space(form.enter(restore(self._state)))
        return SymmetricForm(
            matvec=lambda v: own.flatten(form.matvec(own.restore(v))),
            enter=lambda g: own.flatten(form.enter(restore(g))),
            leave=lambda v, g: self._space.flatten(form.leave(own.restore(v), restore(g))),
            pullback=None if pullback is None else lambda v, g: pullback(own.restore(v), restore(g)),
            follow=form.follow,
            metric=None if metric is None else lambda v: own.flatten(metric(own.restore(v))),
        )

    def jvp(self, tangent) -> Tensor:
        return self._flat(self._inner.jvp)(tangent)

    def vjp(self, cotangent) -> Tensor:
        return self._flat(self._inner.vjp)(cotangent)

    def pullback(self, cotangent) -> Gradients:
        return self._inner.pullback(self._space.restore(cotangent))

    def pullback_and_vjp(self, cotangent) -> tuple[Gradients, Tensor]:
        gradients, product = self._inner.pullback_and_vjp(self._space.restore(cotangent))
        return gradients, self._space.flatten(product)

    def _flat(self, function):
        return lambda *states: self._space.flatten(function(*map(self._space.restore, states)))
